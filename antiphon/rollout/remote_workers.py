"""Rollouts divided among worker processes: attempts go there, references to trajectories come back.

Each worker has episodes, environments, rewards, and a share of the engines with a pool of its own; it keeps trajectories in
files of the record. A group goes to one worker, where the prefix of its prompt is. The attempts of a worker that dies begin
again on the others, as the same attempts; another worker takes its place.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from antiphon.core.deadlines import Deadlines
from antiphon.core.profiles import Profiled
from antiphon.core.rpc import Answerer, Client, Reply
from antiphon.core.types import AttemptId, OnUpdate, PolicyVersion, Prompt, Sampling, Trajectory, WeightsUpdate
from antiphon.core.worker_set import WorkerSet
from antiphon.core.workers import WorkerHandle
from antiphon.record.events import Events
from antiphon.rollout.attempt import UnscoredAttempt
from antiphon.rollout.backend import Refresh, RolloutBackend, keep_weights
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.engine_state import EngineLoad, PoolLoad
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

    async def call_for(self, group: str, method: str, *args: Any) -> Any:
        """Call a method for an attempt of a group."""
        self.open[group] += 1
        try:
            return await self.call(method, *args)
        finally:
            self.open[group] -= 1
            if not self.open[group]:
                del self.open[group]

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
        start: Callable[[int], Awaitable[RolloutWorker]],
        deadlines: Deadlines,
        config: RolloutConfig,
        *,
        report: Callable[[str], None],
        judges: Sequence[EnginePool] = (),
        profiled: Sequence[Profiled] = (),
    ) -> None:
        """Prepare to start `config.workers` workers.

        Args:
            start: Starts a worker with the given share of the engines; `WorkerDiedError` if it cannot be started now.
            deadlines: Bounds all waits.
            config: Deadlines and the number of restarts.
            report: Receives a message about each worker that died.
            judges: Engines of judges, which all workers ask.
            profiled: What is profiled beside the workers.
        """
        self._profiled = profiled
        self._judges = judges
        self._asleep = False  # shared devices are with the learner
        self._stale: asyncio.Queue[RolloutWorker] = asyncio.Queue()
        self._replacements: asyncio.Queue[RolloutWorker] = asyncio.Queue()
        self._lost_tokens = 0, 0  # generated and requeued by workers whose place another one took

        async def start_next(number: int) -> RolloutWorker:
            worker = await start(number)
            worker.on_stale = self._stale.put_nowait
            return worker

        self._workers: WorkerSet[RolloutWorker] = WorkerSet(
            "rollout workers",
            start_next,
            config.workers,
            deadlines,
            report,
            silence=config.engine_timeout,
            patience=config.timeout,
            patience_key="rollout.timeout",
            restarts=config.engine_restarts,
            on_replaced=self._on_replaced,
        )

    async def start(self) -> None:
        """Start all workers; `StallError` if one takes longer than `rollout.timeout`."""
        await self._workers.__aenter__()

    async def close(self) -> None:
        """End all workers, and those that are being started."""
        await self._workers.close()

    def _on_replaced(self, worker: RolloutWorker, lost: RolloutWorker) -> None:
        generated, requeued = self._lost_tokens
        self._lost_tokens = generated + lost.counts.generated_tokens, requeued + lost.counts.requeued_tokens
        self._replacements.put_nowait(worker)

    # --- engines -------------------------------------------------------------------------------------------------------

    @property
    @override
    def engines(self) -> int:
        return sum(worker.counts.engines for worker in self._workers.alive)

    @property
    @override
    def generated_tokens(self) -> int:
        return self._lost_tokens[0] + sum(worker.counts.generated_tokens for worker in self._workers.latest)

    @property
    @override
    def requeued_tokens(self) -> int:  # without those of attempts that a dead worker took along
        return self._lost_tokens[1] + sum(worker.counts.requeued_tokens for worker in self._workers.latest)

    @override
    def describe_load(self) -> PoolLoad:
        """Return the attempts of each worker; how its engines share them, only the worker knows."""
        state = "asleep" if self._asleep else "ready"
        loads = [
            EngineLoad(f"worker {worker.number}", worker.open.total(), 0, worker.version, state)
            for worker in self._workers.alive
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
    async def start_profile(self, memory: bool) -> None:
        await asyncio.gather(
            self._call_all("start_profile", memory), *(p.start_profile(memory) for p in self._profiled)
        )

    @override
    async def write_profile(self, folder: Path, prefix: str) -> None:
        workers = self._workers
        calls = ((each, f"{prefix}rollout-{each.number}-") for each in workers.alive)
        await asyncio.gather(
            *(workers.unless_dead(each, each.call("write_profile", folder, own)) for each, own in calls),
            *(each.write_profile(folder, prefix) for each in self._profiled),
        )

    @override
    async def watch(self, refresh: Refresh = keep_weights) -> None:
        async with asyncio.TaskGroup() as owner:
            owner.create_task(self._keep_refreshing(refresh), name="refresh")
            owner.create_task(self._keep_admitting(), name="admit")
            for judge in self._judges:
                owner.create_task(judge.watch(), name="watch judges")
            await self._workers.raise_end()

    async def _call_all(self, method: str, *args: Any) -> None:
        workers = self._workers
        await asyncio.gather(*(workers.unless_dead(each, each.call(method, *args)) for each in workers.alive))

    async def _keep_refreshing(self, refresh: Refresh) -> None:
        while True:
            worker = await self._stale.get()
            await self._workers.unless_dead(worker, refresh(worker))

    async def _keep_admitting(self) -> None:
        """Have each replacement leave shared devices while the learner has them, and then load weights."""
        while True:
            worker = await self._replacements.get()
            if self._asleep:
                await self._workers.unless_dead(worker, worker.call("release_devices"))
            self._stale.put_nowait(worker)

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
        """Call the worker that has siblings; else the one with the fewest open attempts an engine."""
        return await self._workers.use(
            lambda worker: worker.call_for(group, method, *args),
            f"group {group}",
            lambda each: (group not in each.open, each.open.total() / max(each.counts.engines, 1), each.number),
        )
