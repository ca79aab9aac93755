"""The engine pool: one queue of requests that engines pull from as they have room, and the loading of new weights.

Requests wait here and not in an engine, so that a slow engine delays only what it already runs. A request goes only to
an engine that holds at least the version it asks for. Engines come and go while it works: the requests of one that dies
or hangs go on elsewhere from the tokens they have, and another may take its place.
"""

import asyncio
import heapq
import itertools
import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np

from antiphon.core.deadlines import Deadlines, fail
from antiphon.core.errors import StallError, WeightsError, WorkerDied
from antiphon.core.types import Completion, FinishReason, GenerateRequest, OnUpdate, WeightsUpdate
from antiphon.engines.base import Delta, GenerationHandle, InferenceEngine
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.engine_state import EngineState, LeastLoaded, Pending, Scaling

T = TypeVar("T")

AHEAD = 1.25  # requests sent to an engine, relative to its slots: those that queue there hide the way here and back
PAUSES = 1.0, 60.0  # seconds between attempts to start an engine that cannot be started: at first, and at most
REMEMBERED = 65_536  # conversations and groups

Refresh = Callable[[InferenceEngine], Awaitable[None]]  # gives a new engine the newest weights


async def _as_it_comes(engine: InferenceEngine) -> None: ...


class EnginePool:
    """Places requests on engines, the least loaded first, and siblings where their prefix already is."""

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        deadlines: Deadlines,
        config: RolloutConfig,
        *,
        events: Events,
        on_loss: Callable[[str], None] = lambda message: None,
        respawn: Callable[[], Awaitable[InferenceEngine]] | None = None,
        wanted: int = 0,
        prefers: Mapping[str, str] | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        """`on_loss` is told of each engine that died; `respawn` makes one to take its place, while `watch` runs, and those that
        are `wanted` besides the first; `prefers` has, for some tasks, the class of devices that their requests go to while
        there is room. With `scaling`, which needs `respawn`, engines start while `watch` runs and more is asked than those
        there have slots for, and go when they are idle, but never so that fewer are left than at first."""
        self._least, self._scaling = len(engines), scaling
        self._prefers = dict(prefers or {})
        self.generated_tokens = 0
        self.requeued_tokens = 0  # sampled by engines that died or were lent, and read again by those that went on
        self._members: list[EngineState] = []
        self._deadlines = deadlines
        self._config = config
        self._pinned = config.placement == "pinned"
        self._seats = config.group_size + config.redundancy  # of a group that is pinned
        self._wanted = wanted  # engines
        self._events = events
        self._on_loss = on_loss
        self._respawn = respawn
        self._restarts = config.engine_restarts + max(wanted - len(engines), 0) if respawn else 0
        self._coming = False  # an engine is being started
        self._loss: WorkerDied | None = None  # of the last engine, when none will take its place
        self._due = asyncio.Event()  # engines are to come or to go
        # Least version -> a heap. What waits for a version that no engine has yet is not looked at.
        self._pending: dict[int, list[Pending]] = {}
        self._free: dict[str, LeastLoaded] = defaultdict(LeastLoaded)  # by class of device
        self._outstanding = 0  # requests that wait or run
        self._orders = itertools.count()
        self._sleepers = 0  # engines
        self._ours = asyncio.Event()  # devices that are shared are not with what trains
        self._ours.set()
        self._starting = asyncio.Lock()  # held while an engine starts on one
        self._homes: OrderedDict[str, EngineState] = OrderedDict()  # affinity -> where it was served last
        for engine in engines:
            self.add(engine)

    # --- engines -------------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> int:
        """Engines that live."""
        return len(self._members)

    @property
    def version(self) -> int:
        """Of the weights that every engine holds, or newer ones."""
        return min((member.engine.version for member in self._members), default=0)

    @property
    def _share(self) -> float:
        """What each engine would run if all had the same. None is given more: the first to have loaded new weights would
        take what is meant for all, and siblings would crowd where their prefix is. Groups that are pinned crowd."""
        if self._pinned:
            return math.inf
        return math.ceil(self._outstanding / max(len(self._members) - self._sleepers, 1))

    def add(self, engine: InferenceEngine) -> EngineState:
        """One engine more. It serves what its version allows: if it comes with old weights, all once it has loaded."""
        # A group that is pinned goes to an engine when it has room for all of it.
        limit = max(1, engine.capacity - self._seats + 1) if self._pinned else engine.capacity * AHEAD
        now = asyncio.get_running_loop().time()
        member = EngineState(next(self._events.engine_numbers), engine, limit, engine.version, now)
        self._members.append(member)
        self._wanted = max(self._wanted, len(self._members))
        self._events.add("join", engine=member.number, version=member.version)
        self._put(member, asleep=engine.colocated and not self._ours.is_set())
        self._free[member.engine.device].note(member)
        self._dispatch()
        return member

    async def retire(self, engine: InferenceEngine) -> None:
        """One engine less: it gets no more requests, and is let go when those it has are done."""
        member = next(member for member in self._members if member.engine is engine)
        member.open = False
        self._wanted -= 1
        await self._emptied(member)
        if member in self._members:  # else it has died meanwhile
            self._members.remove(member)
            self._put(member, asleep=False)
            self._events.add("retired", engine=member.number)

    async def sleep_colocated(self) -> None:
        """Have the engines sleep that share a device with what trains: what they run goes on elsewhere, or when they wake."""

        async def lend_one(member: EngineState) -> None:
            if member not in self._members:  # it went this very moment
                return
            self._put(member, asleep=True)
            for handle in member.handles:
                handle.abort()
            await self._emptied(member)
            await self._unless_dead(member, member.engine.sleep())

        async with self._starting:
            self._ours.clear()
        await asyncio.gather(*(lend_one(member) for member in self._members if member.engine.colocated))

    @asynccontextmanager
    async def hold_devices(self) -> AsyncIterator[None]:
        """For an engine to start in, on a device that is shared: such devices are the engines' then, until the turn ends."""
        async with self._starting:
            await self._ours.wait()
            yield

    async def wake_all(self) -> None:
        """Wake all engines that sleep."""
        self._ours.set()
        await asyncio.gather(*map(self._wake, self._members))
        self._dispatch()

    async def _wake(self, member: EngineState) -> None:
        if member.asleep:
            await self._unless_dead(member, member.engine.wake())
            self._put(member, asleep=False)
            self._look_at(member)

    def _put(self, member: EngineState, *, asleep: bool) -> None:
        if member.asleep != asleep:
            member.asleep, member.since = asleep, asyncio.get_running_loop().time()
            self._sleepers += 1 if asleep else -1
            self._note_idle(member)
            self._events.add("sleep" if asleep else "wake", engine=member.number)

    async def _emptied(self, member: EngineState) -> None:
        """Return when nothing runs on an engine any more."""
        while member.running:
            member.idle.clear()
            await self._wait(member.idle.wait(), "empty", "an engine to end its requests")

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Give every engine new weights; returns when all sample from them. Each serves requests as soon as it has them, those
        that slept among them."""

        async def load_one(member: EngineState) -> None:
            await self._with_weights(member, member.engine.load(update, mode))
            await self._wake(member)
            self._dispatch()

        self._ours.set()
        await asyncio.gather(*map(load_one, self._members))

    async def load_stale(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Give the newest weights to those engines that lack them. Who sleeps goes on sleeping."""
        behind = [member for member in self._members if member.engine.version < update.version]
        await asyncio.gather(*(self._with_weights(member, member.engine.load(update, mode)) for member in behind))
        self._dispatch()

    async def watch(self, refresh: Refresh = _as_it_comes) -> None:
        """Find engines that have died unnoticed or hang, kill the latter, and replace what is gone, with weights from
        `refresh`; runs until it is cancelled. `WorkerDied` if no engine is left and none will come."""
        async with asyncio.TaskGroup() as owner:
            owner.create_task(self._keep_checking(), name="health")
            # By itself: what it waits for may need an engine that hangs to be found.
            owner.create_task(self._keep_replacing(refresh), name="replace")
            if self._config.deterministic:
                owner.create_task(self._keep_sealing(), name="seal")

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.gather(*map(self._check, self._members))
            await asyncio.sleep(self._config.engine_timeout / 4)

    async def _keep_replacing(self, refresh: Refresh) -> None:
        pause = PAUSES[0]
        while self._loss is None:
            self._due.clear()
            if (spare := self._spare()) is not None:
                await self._let_go(spare)
            elif not self._restarts or len(self._members) >= self._wanted:
                await self._due.wait()
            elif await self._replace(refresh):
                pause = PAUSES[0]
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSES[1])
        raise self._loss  # to whose request it came may have kept it to itself, as rewards do whose judge is gone

    async def _keep_sealing(self) -> None:
        """Send what is asked for in waves, one after another: each when nobody does anything but wait for it."""
        while True:
            await self._deadlines.quiesce("queue", "groups", "health", "siblings")
            self._seal()
            await self._deadlines.change()

    def _seal(self) -> None:
        """Place all that is pending, whatever the room, in one order and at one moment of each engine."""
        members = [member for member in self._members if member.awake]
        if not (members and self._pending):
            return
        for member in members:
            member.engine.pause()
        wave = sorted(itertools.chain.from_iterable(self._pending.values()), key=_place_in_wave)
        self._pending.clear()
        for number, pending in enumerate(pending for pending in wave if not pending.placed.done()):
            self._place(pending, members[number % len(members)])
        # After those who wait have been woken, in this order, and have started their requests.
        loop = asyncio.get_running_loop()
        for member in members:
            loop.call_soon(member.engine.resume)

    async def _replace(self, refresh: Refresh) -> bool:
        """Whether another engine could be started. While others live, one that cannot takes nothing from the restarts: the node
        that it needs may come back."""
        assert self._respawn is not None
        self._restarts, self._coming = self._restarts - 1, True
        try:
            member = self.add(await self._wait(self._respawn(), "respawn", "a new engine"))
        except (WorkerDied, StallError) as error:
            self._coming = False
            self._give_up_if_empty(WorkerDied(str(error)))
            self._on_loss(f"no engine takes the place that is free yet: {error}")
            self._restarts += bool(self._members)
            return False
        self._coming = False
        if member.asleep:
            await self._unless_dead(member, member.engine.sleep())
        await self._with_weights(member, refresh(member.engine))
        self._dispatch()
        self._grow()
        return True

    async def _with_weights(self, member: EngineState, load: Awaitable[None]) -> None:
        """Let an engine load; do without it if it cannot."""
        try:
            await self._unless_dead(member, load)
        except WeightsError as error:
            member.engine.kill()
            self._lose(member, WorkerDied(f"an engine could not load weights and was killed: {error}"))
        else:
            self._look_at(member)

    async def _unless_dead(self, member: EngineState, work: Awaitable[None]) -> None:
        """Let an engine do something; do without it if it dies."""
        try:
            await work
        except WorkerDied as error:
            self._lose(member, error)

    async def _check(self, member: EngineState) -> None:
        timeout = self._config.engine_timeout
        try:
            await self._deadlines.wait(
                member.engine.health(), name="health", owner="pool", on="an engine", deadline=timeout
            )
        except WorkerDied as error:
            self._lose(member, error)
        except StallError:
            member.engine.kill()
            self._lose(member, WorkerDied(f"an engine did not answer for {timeout:g} s and was killed"))

    def _lose(self, member: EngineState, error: WorkerDied) -> None:
        """Go on without an engine; raise `error` if it was the last and none will take its place."""
        member.open = False
        if member in self._members:
            self._members.remove(member)
            self._put(member, asleep=False)
            self._due.set()
            self._events.add("lost", engine=member.number)
            self._on_loss(f"{error}; engines left: {len(self._members)}")
        self._give_up_if_empty(error)

    def _give_up_if_empty(self, error: WorkerDied) -> None:
        if not (self._members or self._restarts or self._coming):
            self._loss = error
            for pending in itertools.chain.from_iterable(self._pending.values()):
                fail(pending.placed, error)
            raise error

    # --- how many ------------------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Want one engine more if more is asked than those that there are have slots for, and none is on its way."""
        if self._scaling is None or self._wanted >= self._scaling.most:
            return
        coming = self._coming or (self._restarts > 0 and len(self._members) < self._wanted)
        if not coming and self._outstanding > sum(member.engine.capacity for member in self._members):
            self._wanted += 1
            self._restarts += 1  # it takes the place of none that died
            self._events.add("grow", engines=self._wanted, asked=self._outstanding)
            self._due.set()

    def _note_idle(self, member: EngineState) -> None:
        """When nothing runs on an engine that is awake, its time begins."""
        if self._scaling is None:
            return
        member.spare = False
        if member.timer is not None:
            member.timer.cancel()
            member.timer = None
        if member.awake and not member.running:
            seconds = self._scaling.idle_seconds
            member.timer = asyncio.get_running_loop().call_later(seconds, self._note_spare, member)

    def _note_spare(self, member: EngineState) -> None:
        member.spare = True
        self._due.set()

    def _spare(self) -> EngineState | None:
        """An engine that may go."""
        if len(self._members) <= self._least:
            return None
        return next((member for member in self._members if member.spare), None)

    async def _let_go(self, member: EngineState) -> None:
        assert self._scaling is not None
        await self.retire(member.engine)  # at once: nothing runs there
        await self._wait(self._scaling.close(member.engine), "close", "an engine that is not needed")

    # --- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, on_delta: Callable[[Delta], None] | None = None) -> Completion:
        """Run one request to its end; if its engine dies or is lent, another goes on from the tokens it had made. `on_delta` is
        told of tokens as they come.

        Cancelling this aborts the request wherever it is. `WorkerDied` if no engine is left.
        """
        pieces = [await self._generate(request, on_delta)]
        while (piece := pieces[-1]).finish is FinishReason.ABORT:  # nobody else aborts a request that is waited for
            self.requeued_tokens += len(piece.tokens)
            left = request.sampling.max_tokens - len(piece.tokens)
            if not left:  # all that was lost is the word that it had ended
                pieces[-1] = replace(piece, finish=FinishReason.LENGTH)
                break
            request = replace(
                request,
                tokens=np.concatenate([request.tokens, piece.tokens]),
                sampling=replace(request.sampling, max_tokens=left),
            )
            pieces.append(await self._generate(request, on_delta))
        self.generated_tokens += sum(len(piece.tokens) for piece in pieces)
        return pieces[0] if len(pieces) == 1 else Completion.join(pieces)

    async def _generate(self, request: GenerateRequest, on_delta: Callable[[Delta], None] | None) -> Completion:
        """Run a request on one engine; what there is of it, if the engine dies."""
        if self._loss is not None:
            raise self._loss
        self._outstanding += 1
        number = next(self._orders)
        placed = self._enqueue(request, number)
        self._grow()
        handle: GenerationHandle | None = None
        try:
            while not placed.done():
                placed = await self._wait_in_queue(placed, request, number)
            member = placed.result()
            handle = member.engine.start(request)
            member.handles.add(handle)
            if member.asleep:  # it was lent at this very moment
                handle.abort()
            try:
                ended = handle.result() if on_delta is None else _told(handle, on_delta)
                completion = await self._wait(ended, "generation", "an engine")
            except WorkerDied as error:
                self._lose(member, error)
                completion = handle.partial()
            finally:
                member.handles.discard(handle)
            if self._events.enabled:
                self._note_served(request, member, completion)
            return replace(completion, engines=(member.number,))
        except BaseException:
            if handle is not None:
                handle.abort()
            raise
        finally:
            self._outstanding -= 1
            if placed.done() and not placed.cancelled() and not placed.exception():
                self._leave(placed.result(), request)
            self._dispatch()

    def _enqueue(self, request: GenerateRequest, number: int) -> asyncio.Future[EngineState]:
        """Have a request wait for its place, which may be there at once."""
        placed: asyncio.Future[EngineState] = asyncio.get_running_loop().create_future()
        queue = self._pending.setdefault(request.min_version, [])
        heapq.heappush(queue, Pending(request.priority, number, request, placed))
        self._dispatch()
        return placed

    async def _wait_in_queue(
        self, placed: asyncio.Future[EngineState], request: GenerateRequest, number: int
    ) -> asyncio.Future[EngineState]:
        """Wait for the place of a request; returns what has it or, if no engine could have taken it yet, what is to be waited
        for next."""
        try:
            await self._wait(placed, "queue", "a free engine slot")
        except StallError:
            if self._could_take(request):
                raise
            return self._enqueue(request, number)
        return placed

    def _could_take(self, request: GenerateRequest) -> bool:
        """Return True if an engine could have had a request all the time that it waited. Engines that sleep while a learner
        trains, or that load, are waited for as long as these may take."""
        before = asyncio.get_running_loop().time() - self._config.timeout
        return any(
            member.awake and member.version >= request.min_version and member.since <= before
            for member in self._members
        )

    def _seat(self, member: EngineState, request: GenerateRequest) -> None:
        """Count a request that goes to an engine. A group that is pinned has all its seats from its first request to its
        last, as one request for that many answers would."""
        if not self._pinned:
            member.running += 1
        else:
            group = _group(request)
            member.running += 0 if member.groups[group] else self._seats
            member.groups[group] += 1
        self._note_idle(member)
        self._free[member.engine.device].note(member)

    def _leave(self, member: EngineState, request: GenerateRequest) -> None:
        if not self._pinned:
            member.running -= 1
        else:
            group = _group(request)
            member.groups[group] -= 1
            if not member.groups[group]:
                del member.groups[group]
                member.running -= self._seats
        self._look_at(member)
        if not member.running:
            member.idle.set()

    def _look_at(self, member: EngineState) -> None:
        """A member may have changed: it may hold new weights, it may have room."""
        if member.version != member.engine.version:
            member.version, member.since = member.engine.version, asyncio.get_running_loop().time()
            self._events.add("load", engine=member.number, version=member.version)
        self._note_idle(member)
        self._free[member.engine.device].note(member)

    def _note_served(self, request: GenerateRequest, member: EngineState, completion: Completion) -> None:
        versions = completion.versions
        self._events.add(
            "served",
            request=request.id,
            engine=member.number,
            finish=completion.finish,
            tokens=len(completion.tokens),
            versions=[int(versions.min()), int(versions.max())] if len(versions) else [],
        )

    async def _wait(self, awaitable: Awaitable[T], name: str, on: str) -> T:
        deadline, key = self._config.timeout, "rollout.timeout"
        return await self._deadlines.wait(awaitable, name=name, owner="pool", on=on, deadline=deadline, key=key)

    def _dispatch(self) -> None:
        """Place what can be placed, most urgent first; what no engine may take now keeps its turn."""
        while not self._config.deterministic and (found := self._next()):
            pending, member = found
            queue = self._pending[pending.request.min_version]
            heapq.heappop(queue)
            if not queue:
                del self._pending[pending.request.min_version]
            self._place(pending, member)

    def _place(self, pending: Pending, member: EngineState) -> None:
        request = pending.request
        self._seat(member, request)
        self._remember(request, member)
        self._events.add("place", request=request.id, engine=member.number, prompt=len(request.tokens))
        pending.placed.set_result(member)

    def _next(self) -> tuple[Pending, EngineState] | None:
        """The most urgent request that can be placed, and where."""
        possible = []
        for version, queue in list(self._pending.items()):
            while queue and queue[0].placed.done():  # cancelled while it waited
                heapq.heappop(queue)
            if not queue:
                del self._pending[version]
            elif (member := self._place_for(queue[0].request)) is not None:
                possible.append((queue[0], member))
        return min(possible, key=lambda found: found[0], default=None)

    def _place_for(self, request: GenerateRequest) -> EngineState | None:
        """Where the longest prefix is, if there is room; else where there is most room, on what the task prefers first."""
        for shared in request.affinity:
            home = self._homes.get(shared)
            if home is None:
                continue
            if self._pinned and home.awake and home.version >= request.min_version:
                return home
            if home.takes(request.min_version) and home.running < self._share:
                return home
        wanted = self._prefers.get(request.task)
        if wanted in self._free and (member := self._free[wanted].best(request.min_version, math.inf)):
            return member
        found = [member for free in self._free.values() if (member := free.best(request.min_version, self._share))]
        return min(found, key=lambda member: (member.running, member.number), default=None)

    def _remember(self, request: GenerateRequest, home: EngineState) -> None:
        for shared in request.affinity:
            self._homes[shared] = home
            self._homes.move_to_end(shared)
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)


async def _told(handle: GenerationHandle, on_delta: Callable[[Delta], None]) -> Completion:
    """The result of a request, whose tokens are passed on as they come."""
    async for delta in handle:
        on_delta(delta)
    return await handle.result()


def _group(request: GenerateRequest) -> str:
    return (request.affinity or (request.id,))[-1]


def _place_in_wave(pending: Pending) -> tuple[int, list[int]]:
    """By priority, then by the numbers of group, sibling, try and turn."""
    return pending.priority, [int(number) for number in re.split(r"[./]", pending.request.id)]
