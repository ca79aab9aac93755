"""The engine pool: one queue of requests that engines pull from as they have room, and the loading of new weights.

Requests wait here and not in an engine, so that a slow engine delays only what it already runs. A request goes only to
an engine that holds at least the version it asks for.
"""

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from antiphon.engines.base import GenerationHandle, InferenceEngine
from antiphon.errors import StallError, WorkerDied
from antiphon.types import Completion, FinishReason, GenerateRequest, OnUpdate, WeightsUpdate
from antiphon.waits import Waits, fail

T = TypeVar("T")

AHEAD = 1.25  # requests sent to an engine, relative to its slots: those that queue there hide the way here and back
REMEMBERED = 4096  # affinities


@dataclass(order=True, slots=True)
class _Pending:
    priority: int
    number: int
    request: GenerateRequest = field(compare=False)
    placed: asyncio.Future["_Member"] = field(compare=False)


@dataclass(slots=True, eq=False)
class _Member:
    engine: InferenceEngine
    running: int = 0

    @property
    def has_room(self) -> bool:
        return self.running < self.engine.capacity * AHEAD


class EnginePool:
    """Places requests on engines, the least loaded first, and siblings where their prefix already is."""

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        waits: Waits,
        timeout: float,
        engine_timeout: float = 60.0,
        on_loss: Callable[[str], None] = lambda message: None,
    ) -> None:
        """A wait that takes `timeout` seconds fails the run, an engine that is silent for `engine_timeout` is killed.
        `on_loss` is told of each engine that died."""
        self.generated_tokens = 0
        self.requeued_tokens = 0  # sampled by engines that died, and read again by those that went on
        self._members = [_Member(engine) for engine in engines]
        self._waits = waits
        self._timeout = timeout
        self._engine_timeout = engine_timeout
        self._on_loss = on_loss
        self._loss: WorkerDied | None = None  # of the last engine
        # Least version -> a heap. What waits for a version that no engine has yet is not looked at.
        self._pending: dict[int, list[_Pending]] = {}
        self._numbers = itertools.count()
        self._homes: OrderedDict[str, _Member] = OrderedDict()  # affinity -> where it was served last

    @property
    def engines(self) -> int:
        """Engines that live."""
        return len(self._members)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Run one request to its end; if its engine dies, another goes on from the tokens it had made.

        Cancelling this aborts the request wherever it is. `WorkerDied` if no engine is left.
        """
        pieces = [await self._generate(request)]
        while (piece := pieces[-1]).finish is FinishReason.ABORT:  # nobody else aborts a request that is waited for
            self.requeued_tokens += len(piece.tokens)
            left = request.sampling.max_tokens - len(piece.tokens)
            request = replace(
                request,
                tokens=np.concatenate([request.tokens, piece.tokens]),
                sampling=replace(request.sampling, max_tokens=left),
            )
            pieces.append(await self._generate(request))
        self.generated_tokens += sum(len(piece.tokens) for piece in pieces)
        return pieces[0] if len(pieces) == 1 else Completion.join(pieces)

    async def _generate(self, request: GenerateRequest) -> Completion:
        """Run a request on one engine; what there is of it, if the engine dies."""
        if self._loss is not None:
            raise self._loss
        placed: asyncio.Future[_Member] = asyncio.get_running_loop().create_future()
        queue = self._pending.setdefault(request.min_version, [])
        heapq.heappush(queue, _Pending(request.priority, next(self._numbers), request, placed))
        self._dispatch()
        handle: GenerationHandle | None = None
        try:
            member = await self._wait(placed, "queue", "a free engine slot")
            handle = member.engine.start(request)
            try:
                return await self._wait(handle.result(), "generation", "an engine")
            except WorkerDied as error:
                self._lose(member, error)
                return handle.partial()
        except BaseException:
            if handle is not None:
                handle.abort()
            raise
        finally:
            if placed.done() and not placed.cancelled() and not placed.exception():
                placed.result().running -= 1
            self._dispatch()

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Give every engine new weights; returns when all sample from them. Each serves requests as soon as it has them."""

        async def load_one(member: _Member) -> None:
            try:
                await member.engine.load(update, mode)
            except WorkerDied as error:
                self._lose(member, error)
            self._dispatch()

        await self._wait(asyncio.gather(*map(load_one, self._members)), "load", "engines to load weights")

    async def watch(self) -> None:
        """Find engines that have died unnoticed or hang, and kill the latter; runs until it is cancelled."""
        while True:
            await asyncio.gather(*map(self._check, self._members))
            await asyncio.sleep(self._engine_timeout / 4)

    async def _check(self, member: _Member) -> None:
        try:
            await self._waits.wait(
                member.engine.health(), name="health", owner="pool", on="an engine", deadline=self._engine_timeout
            )
        except WorkerDied as error:
            self._lose(member, error)
        except StallError:
            member.engine.kill()
            self._lose(member, WorkerDied(f"an engine did not answer for {self._engine_timeout:g} s and was killed"))

    def _lose(self, member: _Member, error: WorkerDied) -> None:
        """Go on without an engine; raise `error` if it was the last."""
        if member in self._members:
            self._members.remove(member)
            self._on_loss(f"{error}; engines left: {len(self._members)}")
        if not self._members:
            self._loss = error
            for pending in itertools.chain.from_iterable(self._pending.values()):
                fail(pending.placed, error)
            raise error

    async def _wait(self, awaitable: Awaitable[T], name: str, on: str) -> T:
        return await self._waits.wait(awaitable, name=name, owner="pool", on=on, deadline=self._timeout)

    def _dispatch(self) -> None:
        """Place what can be placed, most urgent first; what no engine may take now keeps its turn."""
        while free := [member for member in self._members if member.has_room]:
            newest = max(member.engine.version for member in free)
            waiting = {version: queue for version, queue in self._pending.items() if version <= newest}
            if not waiting:
                return
            version, queue = min(waiting.items(), key=lambda item: item[1][0])
            pending = heapq.heappop(queue)
            if not queue:
                del self._pending[version]
            if not pending.placed.done():  # else cancelled while it waited
                member = self._choose(pending.request, [m for m in free if m.engine.version >= version])
                member.running += 1
                pending.placed.set_result(member)

    def _choose(self, request: GenerateRequest, eligible: list[_Member]) -> _Member:
        home = self._homes.get(request.affinity)
        member = home if home in eligible else min(eligible, key=lambda m: m.running)
        if request.affinity:
            self._homes[request.affinity] = member
            self._homes.move_to_end(request.affinity)
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        return member
