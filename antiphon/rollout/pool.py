"""The engine pool: generates completions on engines that come and go, and loads new weights into them.

Requests wait in the pool and not in an engine, so that a slow engine delays only what it already runs. The requests of an
engine that dies or hangs continue on another from the tokens they have.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import StallError, WorkerDiedError
from antiphon.core.types import Completion, FinishReason, GenerateRequest, OnUpdate, WeightsUpdate
from antiphon.engines.base import GenerationHandle, InferenceEngine
from antiphon.engines.deltas import Delta
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.engine_state import EngineState, PoolLoad
from antiphon.rollout.engine_supervisor import EngineSupervisor, EngineSupply, LoadWeights
from antiphon.rollout.request_placement import RequestPlacement


async def _load_nothing(engine: InferenceEngine) -> None: ...


class EnginePool:
    """Places requests on engines, the least loaded first, and siblings where their prefix already is."""

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        deadlines: Deadlines,
        config: RolloutConfig,
        *,
        events: Events,
        report_death: Callable[[str], None] = lambda message: None,
        supply: EngineSupply | None = None,
        preferred_devices: Mapping[str, str] | None = None,
    ) -> None:
        """Create a pool.

        Args:
            engines: The engines that it begins with.
            deadlines: Bound every wait.
            config: Scheduling of the run.
            events: Record what happens to engines and requests.
            report_death: Receives a message for each engine that died or cannot be started.
            supply: Starts more engines, and those that replace dead ones, while `watch` runs.
            preferred_devices: Class of devices by task; a task's requests go there while there is room.
        """
        self.generated_tokens = 0
        self.requeued_tokens = 0  # sampled by engines that died or fell asleep, and read again by others
        self._config = config
        self._deadlines = deadlines
        self._events = events
        self._order = itertools.count()  # of requests, by age
        self._starting = asyncio.Lock()  # held while an engine starts on a shared device
        self._placement = RequestPlacement(config, events, preferred_devices or {})
        self._supervisor = EngineSupervisor(
            self._placement, config, deadlines, events, supply=supply, report_death=report_death
        )
        self._supervisor.add_first(engines)

    # --- engines -------------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> int:
        """Number of living engines."""
        return len(self._placement.members)

    @property
    def version(self) -> int:
        """Oldest version that an engine holds."""
        return min((member.engine.version for member in self._placement.members), default=0)

    def describe_load(self) -> PoolLoad:
        """Return what each engine does now, and how many requests wait for one."""
        engines = [member.describe_load() for member in self._placement.members]
        running = sum(engine.running for engine in engines)
        return PoolLoad(engines, max(self._placement.outstanding - running, 0))

    def add(self, engine: InferenceEngine) -> EngineState:
        """Add an engine. It serves what its version allows: if its weights are old, everything once it has loaded."""
        return self._supervisor.add(engine)

    async def retire(self, engine: InferenceEngine) -> None:
        """Give an engine no more requests, and remove it when those it has are done."""
        await self._supervisor.retire(engine)

    async def watch(self, load_weights: LoadWeights = _load_nothing) -> None:
        """Kill engines that hang, and replace those that died or were killed, until cancelled.

        Args:
            load_weights: Loads the newest weights into a new engine.

        Raises:
            WorkerDiedError: If no engine is left and none will be started; in an exception group.
        """
        async with asyncio.TaskGroup() as owner:
            owner.create_task(self._supervisor.check_health(), name="health")
            # In a task of its own: what it waits for may need the check of an engine that hangs.
            owner.create_task(self._supervisor.keep_target(load_weights), name="replace")
            if self._config.deterministic:
                owner.create_task(self._place_waves(), name="waves")

    async def _place_waves(self) -> None:
        """Place requests in waves, each when every other task waits for it."""
        while True:
            await self._deadlines.quiesce("queue", "groups", "health", "siblings")
            self._placement.place_wave()
            await self._deadlines.change()

    # --- devices that are shared with the learner, and weights ---------------------------------------------------------

    async def sleep_colocated(self) -> None:
        """Let the engines on shared devices sleep. Their requests continue elsewhere, or when they wake."""

        async def put_to_sleep(member: EngineState) -> None:
            if member not in self._placement.members:  # it was removed this very moment
                return
            self._placement.set_asleep(member, asleep=True)
            for handle in member.handles:
                handle.abort()
            await self._supervisor.wait_until_idle(member)
            await self._supervisor.run_unless_dead(member, member.engine.sleep())

        async with self._starting:
            self._supervisor.shared_devices_free.clear()
        await asyncio.gather(*(put_to_sleep(member) for member in self._placement.members if member.engine.colocated))

    @asynccontextmanager
    async def hold_devices(self) -> AsyncIterator[None]:
        """Wait until engines may use shared devices, and keep the learner off them for the context, so that one can start."""
        async with self._starting:
            await self._supervisor.shared_devices_free.wait()
            yield

    async def wake_all(self) -> None:
        """Wake all engines that sleep."""
        self._supervisor.shared_devices_free.set()
        await asyncio.gather(*map(self._wake, self._placement.members))
        self._placement.dispatch()

    async def _wake(self, member: EngineState) -> None:
        if member.asleep:
            await self._supervisor.run_unless_dead(member, member.engine.wake())
            self._placement.set_asleep(member, asleep=False)
            self._placement.update(member)

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load new weights into every engine, and wake those that sleep; return when all have loaded.

        Each engine gets requests as soon as it has loaded.
        """

        async def load_one(member: EngineState) -> None:
            await self._supervisor.load_or_remove(member, member.engine.load(update, mode))
            await self._wake(member)
            self._placement.dispatch()

        self._supervisor.shared_devices_free.set()
        await asyncio.gather(*map(load_one, self._placement.members))

    async def load_stale(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load weights into those engines that hold older ones. An engine that sleeps stays asleep."""
        stale = [member for member in self._placement.members if member.engine.version < update.version]
        load = self._supervisor.load_or_remove
        await asyncio.gather(*(load(member, member.engine.load(update, mode)) for member in stale))
        self._placement.dispatch()

    # --- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, on_delta: Callable[[Delta], None] | None = None) -> Completion:
        """Run one request to its end. If its engine dies or falls asleep, another continues from the tokens sampled so far.

        Cancelling this aborts the request wherever it is.

        Args:
            request: The request.
            on_delta: Receives tokens as they arrive.

        Raises:
            WorkerDiedError: If no engine is left.
        """
        pieces = [await self._generate(request, on_delta)]
        while (piece := pieces[-1]).finish is FinishReason.ABORT:  # only because its engine died or fell asleep
            self.requeued_tokens += len(piece.tokens)
            left = request.sampling.max_tokens - len(piece.tokens)
            if not left:  # all tokens had arrived; only the finish reason was lost
                pieces[-1] = replace(piece, finish=FinishReason.LENGTH)
                break
            request = replace(
                request,
                tokens=np.concatenate([request.tokens, piece.tokens]),
                sampling=replace(request.sampling, max_tokens=left),
                sampled=request.sampled + len(piece.tokens),
            )
            pieces.append(await self._generate(request, on_delta))
        self.generated_tokens += sum(len(piece.tokens) for piece in pieces)
        return pieces[0] if len(pieces) == 1 else Completion.join(pieces)

    async def _generate(self, request: GenerateRequest, on_delta: Callable[[Delta], None] | None) -> Completion:
        """Run a request on one engine; return the partial completion if the engine dies."""
        if self._supervisor.final_death is not None:
            raise self._supervisor.final_death
        self._placement.outstanding += 1
        number = next(self._order)
        placed = self._placement.enqueue(request, number)
        self._supervisor.scale_up()
        try:
            while not placed.done():
                placed = await self._wait_in_queue(placed, request, number)
            return await self._run_on(placed.result(), request, on_delta)
        finally:
            self._placement.outstanding -= 1
            if placed.done() and not placed.cancelled() and not placed.exception():
                self._placement.release(placed.result(), request)
            self._placement.dispatch()

    async def _run_on(
        self, member: EngineState, request: GenerateRequest, on_delta: Callable[[Delta], None] | None
    ) -> Completion:
        handle = member.engine.start(request)
        member.handles.add(handle)
        if member.asleep:  # it fell asleep in the meantime
            handle.abort()
        try:
            completion = await self._complete(member, handle, on_delta)
        except BaseException:
            handle.abort()
            raise
        finally:
            member.handles.discard(handle)
        if self._events.enabled:
            self._record_served(request, member, completion)
        return replace(completion, engines=(member.number,))

    async def _complete(
        self, member: EngineState, handle: GenerationHandle, on_delta: Callable[[Delta], None] | None
    ) -> Completion:
        """Return the result of a request, or the tokens that arrived if its engine dies."""
        try:
            ended = handle.result() if on_delta is None else _stream_result(handle, on_delta)
            return await self._supervisor.wait(ended, "generation", "an engine")
        except WorkerDiedError as error:
            self._supervisor.on_engine_lost(member, error)
            return handle.partial()

    async def _wait_in_queue(
        self, placed: asyncio.Future[EngineState], request: GenerateRequest, number: int
    ) -> asyncio.Future[EngineState]:
        """Wait for an engine. If none could have taken the request in that time, queue it anew and return that future.

        Engines that sleep while a learner trains, or that load, are waited for as long as these may take.
        """
        try:
            await self._supervisor.wait(placed, "queue", "a free engine slot")
        except StallError:
            if placed.done() and not placed.cancelled():  # in the moment in which the time was up
                return placed
            if self._placement.could_have_placed(request, self._config.timeout):
                raise
            return self._placement.enqueue(request, number)
        return placed

    def _record_served(self, request: GenerateRequest, member: EngineState, completion: Completion) -> None:
        versions = completion.versions
        self._events.add(
            "served",
            request=request.id,
            engine=member.number,
            finish=completion.finish,
            tokens=len(completion.tokens),
            versions=[int(versions.min()), int(versions.max())] if len(versions) else [],
        )


async def _stream_result(handle: GenerationHandle, on_delta: Callable[[Delta], None]) -> Completion:
    """Pass the deltas of a request on as they come, and return its result."""
    async for delta in handle:
        on_delta(delta)
    return await handle.result()
