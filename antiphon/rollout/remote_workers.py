"""Rollouts divided among worker processes: attempts go there, references to trajectories come back.

Each worker has episodes, environments, rewards, and a share of the engines with a pool of its own; it keeps trajectories in
files of the record. A group goes to one worker, where the prefix of its prompt is. The attempts of a worker that dies begin
again on the others, as the same attempts; another worker takes its place.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import StallError, WorkerDiedError
from antiphon.core.rpc import Answerer, AnswererDiedError, Client, Reply
from antiphon.core.types import AttemptId, OnUpdate, PolicyVersion, Prompt, Sampling, Trajectory, WeightsUpdate
from antiphon.core.workers import WorkerHandle
from antiphon.record.events import Events
from antiphon.rollout.attempt import UnscoredAttempt
from antiphon.rollout.backend import Refresh, RolloutBackend, keep_weights
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.engine_state import EngineLoad, PoolLoad
from antiphon.rollout.engine_supervisor import RETRY_SECONDS
from antiphon.rollout.pool import EnginePool


class Counts(NamedTuple):
    """State of a worker's engine pool."""

    version: int = 0  # that all of its engines hold
    engines: int = 0  # that live
    generated_tokens: int = 0
    requeued_tokens: int = 0


class RolloutWorker(Client):
    """One worker, which loads weights as an engine does."""

    def __init__(
        self,
        handle: WorkerHandle,
        number: int,
        events: Events,
        report: Callable[[str], None],
        judges: Mapping[Hashable, Answerer] | None = None,
    ) -> None:
        """Follow a worker that has share `number` of the engines; pass its events and messages on.

        The worker may ask `judges`, by their names.
        """
        self.number = number
        self.counts = Counts()
        self.open: Counter[str] = Counter()  # group -> its attempts there
        self.on_stale: Callable[[RolloutWorker], None] = lambda worker: None  # an engine there lacks the newest weights
        self._events = events
        self._report = report
        self._engines: set[int] = set()  # their numbers
        super().__init__(handle, judges)

    @property
    def version(self) -> int:
        """Number of the version that all of its engines hold."""
        return self.counts.version

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load weights into those of its engines that lack them."""
        await self.call("load_stale", update, mode)

    @override
    def kill(self) -> None:
        super().kill()
        for engine in sorted(self._engines):  # they end with it
            self._events.add("lost", engine=engine)
        self._engines.clear()

    @override
    def _on_reply(self, reply: Reply) -> None:
        self.counts = reply.state
        match reply.kind:
            case "stale":
                self.on_stale(self)
            case "message":
                self._report(reply.value)
            case "event":
                self._record_event(*reply.value)
            case _:
                super()._on_reply(reply)

    def _record_event(self, event: str, fields: dict[str, Any]) -> None:
        if "request" in fields and fields["request"].partition(".")[0] not in self.open:
            return  # sent before the worker heard that the attempt was cancelled
        if event == "join":
            self._engines.add(fields["engine"])
        elif event in ("lost", "retired"):
            self._engines.discard(fields["engine"])
        self._events.add(event, **fields)


class RolloutWorkers(RolloutBackend):
    """Rollout workers as one backend."""

    def __init__(
        self,
        workers: Sequence[RolloutWorker],
        deadlines: Deadlines,
        config: RolloutConfig,
        *,
        start: Callable[[int], Awaitable[RolloutWorker]],
        on_loss: Callable[[str], None],
        judges: Sequence[EnginePool] = (),
    ) -> None:
        """Send attempts to `workers`.

        Args:
            workers: The first workers.
            deadlines: Bounds all waits.
            config: Deadlines and the number of restarts.
            start: Starts a worker with the given share of the engines, to replace one that died while `watch` runs.
            on_loss: Receives a message about each worker that died.
            judges: Engines of judges, which all workers ask.
        """
        self._judges = judges
        self._workers: list[RolloutWorker] = []
        self._ever: list[RolloutWorker] = []  # the dead included
        self._deadlines = deadlines
        self._config = config
        self._start = start
        self._on_loss = on_loss
        self._restarts = config.engine_restarts
        self._starting = 0  # workers
        self._asleep = False  # shared devices are with the learner
        self._arrived = asyncio.Event()  # a worker has come
        self._lost: asyncio.Queue[int] = asyncio.Queue()  # numbers of workers
        self._stale: asyncio.Queue[RolloutWorker] = asyncio.Queue()
        for worker in workers:
            self._add(worker)

    # --- engines -------------------------------------------------------------------------------------------------------

    @property
    @override
    def engines(self) -> int:
        return sum(worker.counts.engines for worker in self._workers)

    @property
    @override
    def generated_tokens(self) -> int:
        return sum(worker.counts.generated_tokens for worker in self._ever)

    @property
    @override
    def requeued_tokens(self) -> int:  # without those of attempts that a dead worker took along
        return sum(worker.counts.requeued_tokens for worker in self._ever)

    @override
    def describe_load(self) -> PoolLoad:
        """Return the attempts of each worker; how its engines share them, only the worker knows."""
        state = "asleep" if self._asleep else "ready"
        loads = [
            EngineLoad(f"worker {worker.number}", worker.open.total(), 0, worker.version, state)
            for worker in self._workers
        ]
        return PoolLoad(loads, 0)

    @override
    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        self._asleep = False
        await self._call_all("load", update, mode)

    @override
    async def release_devices(self) -> None:
        self._asleep = True
        await asyncio.gather(self._call_all("release_devices"), *(judge.sleep_colocated() for judge in self._judges))

    @override
    async def reclaim_judges(self) -> None:
        await asyncio.gather(*(judge.wake_all() for judge in self._judges))

    @override
    async def reclaim_engines(self) -> None:
        self._asleep = False
        await self._call_all("reclaim_engines")

    @override
    async def watch(self, refresh: Refresh = keep_weights) -> None:
        async with asyncio.TaskGroup() as owner:
            owner.create_task(self._keep_checking(), name="health")
            owner.create_task(self._keep_refreshing(refresh), name="refresh")
            for judge in self._judges:
                owner.create_task(judge.watch(), name="watch judges")
            while True:
                number = await self._lost.get()
                owner.create_task(self._replace(number), name=f"replace rollout worker {number}")

    async def _call_all(self, method: str, *args: Any) -> None:
        calls = [self._unless_dead(worker, worker.call(method, *args)) for worker in self._workers]
        await asyncio.gather(*calls)

    async def _unless_dead(self, worker: RolloutWorker, work: Awaitable[None]) -> None:
        try:
            await work
        except WorkerDiedError as error:
            self._lose(worker, error)

    async def _wait(self, awaitable: Awaitable[Any], name: str, on: str) -> Any:
        deadline, key = self._config.timeout, "rollout.timeout"
        return await self._deadlines.wait(awaitable, name=name, owner="pool", on=on, deadline=deadline, key=key)

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.gather(*map(self._check, self._workers))
            await asyncio.sleep(self._config.engine_timeout / 4)

    async def _check(self, worker: RolloutWorker) -> None:
        answer, deadline = worker.call("health"), self._config.engine_timeout
        try:
            await self._deadlines.wait(answer, name="health", owner="pool", on="a rollout worker", deadline=deadline)
        except WorkerDiedError as error:
            self._lose(worker, error)
        except StallError:
            self._lose(worker, WorkerDiedError(f"a rollout worker did not answer for {deadline:g} s and was killed"))

    async def _keep_refreshing(self, refresh: Refresh) -> None:
        while True:
            worker = await self._stale.get()
            await self._unless_dead(worker, refresh(worker))

    async def _replace(self, number: int) -> None:
        """Start another worker. While others live, a failed start costs no restart, as with engines."""
        pause = RETRY_SECONDS[0]
        while self._restarts:
            self._restarts, self._starting = self._restarts - 1, self._starting + 1
            try:
                worker = await self._wait(self._start(number), "respawn", "a new rollout worker")
            except (WorkerDiedError, StallError) as error:
                self._starting -= 1
                self._give_up_if_empty(WorkerDiedError(str(error)))
                self._on_loss(f"no rollout worker takes the place of one that was lost yet: {error}")
                self._restarts += bool(self._workers)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
                continue
            self._starting -= 1
            self._add(worker)
            if self._asleep:
                await self._unless_dead(worker, worker.call("release_devices"))
            self._stale.put_nowait(worker)
            return

    def _add(self, worker: RolloutWorker) -> None:
        worker.on_stale = self._stale.put_nowait
        self._workers.append(worker)
        self._ever.append(worker)
        self._arrived.set()

    def _lose(self, worker: RolloutWorker, error: WorkerDiedError) -> None:
        """Go on without a worker; raise `error` if it was the last and none will take its place."""
        if worker in self._workers:
            self._workers.remove(worker)
            worker.kill()
            self._lost.put_nowait(worker.number)
            self._on_loss(f"{error}; rollout workers left: {len(self._workers)}")
        self._give_up_if_empty(error)

    def _give_up_if_empty(self, error: WorkerDiedError) -> None:
        if not (self._workers or self._restarts or self._starting):
            raise error

    # --- attempts ------------------------------------------------------------------------------------------------------

    @override
    async def run(self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion) -> Trajectory:
        """Run one attempt to its score; the trajectory is durable when this returns."""
        return await self._call_worker_of(str(attempt.group), "run", prompt, attempt, started)

    @override
    async def generate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling | None = None
    ) -> UnscoredAttempt:
        return await self._call_worker_of(str(attempt.group), "generate", prompt, attempt, started, sampling)

    @override
    async def score(self, unscored: UnscoredAttempt) -> Trajectory:
        """Score what `generate` returned; the trajectory is durable when this returns."""
        return await self._call_worker_of(str(unscored.attempt.group), "score", unscored)

    @override
    async def evaluate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling
    ) -> Trajectory:
        return await self._call_worker_of(str(attempt.group), "evaluate", prompt, attempt, started, sampling)

    async def _call_worker_of(self, group: str, method: str, *args: Any) -> Any:
        """Call the worker that has the group; another one if that dies."""
        while True:
            worker = await self._find_worker(group)
            worker.open[group] += 1
            try:
                return await worker.call(method, *args)
            except AnswererDiedError:  # a judge is gone, and every worker asks the same one
                raise
            except WorkerDiedError as error:
                self._lose(worker, error)
            finally:
                worker.open[group] -= 1
                if not worker.open[group]:
                    del worker.open[group]

    async def _find_worker(self, group: str) -> RolloutWorker:
        """Return the worker that has siblings; else the one with the fewest open attempts an engine."""
        while not self._workers:
            self._arrived.clear()
            await self._wait(self._arrived.wait(), "worker", "a rollout worker to take the place of the last")
        having = [worker for worker in self._workers if group in worker.open]
        return min(having or self._workers, key=lambda worker: worker.open.total() / max(worker.counts.engines, 1))
