"""Rollout workers, as the controller sees them: attempts go there, references to trajectories come back.

Each worker runs what otherwise runs beside the loop: episodes, environments, rewards, and a share of the engines with a pool of
its own; what comes of them it keeps in files of the record. A group goes to one worker, where the prefix of its prompt is.
The attempts of a worker that dies begin again on the others, as the same attempts; another worker takes its place.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import StallError, WorkerDied
from antiphon.core.rpc import Client, Reply
from antiphon.core.types import AttemptId, OnUpdate, PolicyVersion, Prompt, Sampling, Trajectory, WeightsUpdate
from antiphon.core.workers import WorkerHandle
from antiphon.record.events import Events
from antiphon.rollout.attempt import UnscoredAttempt
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.engine_supervisor import RETRY_SECONDS


class Counts(NamedTuple):
    """How the pool of a worker is."""

    version: int = 0  # that all of its engines hold
    engines: int = 0  # that live
    generated_tokens: int = 0
    requeued_tokens: int = 0


class RolloutWorker(Client):
    """One worker. To `load`, it is like an engine."""

    def __init__(self, handle: WorkerHandle, number: int, events: Events, tell: Callable[[str], None]) -> None:
        """`number` says which share of the engines it has; `events` and `tell` hear what its pool says."""
        self.number = number
        self.counts = Counts()
        self.open: Counter[str] = Counter()  # group -> its attempts there
        self.on_stale: Callable[[RolloutWorker], None] = lambda shard: None  # an engine there lacks the newest weights
        self._events = events
        self._tell = tell
        self._engines: set[int] = set()  # their numbers
        super().__init__(handle)

    @property
    def version(self) -> int:
        """What all of its engines hold."""
        return self.counts.version

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Give weights to those of its engines that lack them."""
        await self.ask("load_stale", update, mode)

    def kill(self) -> None:
        """End it by force, and its engines with it."""
        super().kill()
        for engine in sorted(self._engines):
            self._events.add("lost", engine=engine)
        self._engines.clear()

    def _hear(self, word: Reply) -> None:
        self.counts = word.state
        match word.kind:
            case "stale":
                self.on_stale(self)
            case "message":
                self._tell(word.value)
            case "event":
                self._note(*word.value)
            case _:
                super()._hear(word)

    def _note(self, event: str, what: dict[str, Any]) -> None:
        if "request" in what and what["request"].partition(".")[0] not in self.open:
            return  # it crossed the word that nobody needs the attempt any more
        if event == "join":
            self._engines.add(what["engine"])
        elif event in ("lost", "retired"):
            self._engines.discard(what["engine"])
        self._events.add(event, **what)


class RolloutWorkers:
    """What the loop has in the place of an engine pool and of what runs episodes."""

    def __init__(
        self,
        shards: Sequence[RolloutWorker],
        deadlines: Deadlines,
        config: RolloutConfig,
        *,
        start: Callable[[int], Awaitable[RolloutWorker]],
        on_loss: Callable[[str], None],
    ) -> None:
        """`start` makes a worker with the engines of this number, to take the place of one that died, while `watch` runs."""
        self._shards: list[RolloutWorker] = []
        self._ever: list[RolloutWorker] = []  # the dead among them
        self._deadlines = deadlines
        self._config = config
        self._start = start
        self._on_loss = on_loss
        self._restarts = config.engine_restarts
        self._coming = 0  # workers that are being started
        self._lent = False  # devices that are shared are with what trains
        self._arrived = asyncio.Event()  # a worker has come
        self._lost: asyncio.Queue[int] = asyncio.Queue()  # numbers of workers
        self._stale: asyncio.Queue[RolloutWorker] = asyncio.Queue()
        for shard in shards:
            self._add(shard)

    # --- as an engine pool ---------------------------------------------------------------------------------------------

    @property
    def engines(self) -> int:
        """Engines that live."""
        return sum(shard.counts.engines for shard in self._shards)

    @property
    def generated_tokens(self) -> int:
        """See `EnginePool.generated_tokens`."""
        return sum(shard.counts.generated_tokens for shard in self._ever)

    @property
    def requeued_tokens(self) -> int:
        """See `EnginePool.requeued_tokens`. What a worker took along is not counted."""
        return sum(shard.counts.requeued_tokens for shard in self._ever)

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Give every engine new weights; returns when all sample from them. Each worker serves as soon as its own do."""
        self._lent = False
        await self._all("load", update, mode)

    async def sleep_colocated(self) -> None:
        """See `EnginePool.sleep_colocated`."""
        self._lent = True
        await self._all("sleep_colocated")

    async def wake_all(self) -> None:
        """See `EnginePool.wake_all`."""
        self._lent = False
        await self._all("wake_all")

    async def watch(self, refresh: Callable[[RolloutWorker], Awaitable[None]]) -> None:
        """Find workers that have died unnoticed or hang, and replace what is gone; `refresh` gives weights to who lacks them.
        Runs until it is cancelled. `WorkerDied` if no worker is left and none will come."""
        async with asyncio.TaskGroup() as owner:
            owner.create_task(self._keep_checking(), name="health")
            owner.create_task(self._keep_refreshing(refresh), name="refresh")
            while True:
                number = await self._lost.get()
                owner.create_task(self._replace(number), name=f"replace rollout worker {number}")

    async def _all(self, method: str, *args: Any) -> None:
        work = [self._unless_dead(shard, shard.ask(method, *args)) for shard in self._shards]
        await asyncio.gather(*work)

    async def _unless_dead(self, shard: RolloutWorker, work: Awaitable[None]) -> None:
        try:
            await work
        except WorkerDied as error:
            self._lose(shard, error)

    async def _wait(self, awaitable: Awaitable[Any], name: str, on: str) -> Any:
        deadline, key = self._config.timeout, "rollout.timeout"
        return await self._deadlines.wait(awaitable, name=name, owner="pool", on=on, deadline=deadline, key=key)

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.gather(*map(self._check, self._shards))
            await asyncio.sleep(self._config.engine_timeout / 4)

    async def _check(self, shard: RolloutWorker) -> None:
        answer, deadline = shard.ask("health"), self._config.engine_timeout
        try:
            await self._deadlines.wait(answer, name="health", owner="pool", on="a rollout worker", deadline=deadline)
        except WorkerDied as error:
            self._lose(shard, error)
        except StallError:
            self._lose(shard, WorkerDied(f"a rollout worker did not answer for {deadline:g} s and was killed"))

    async def _keep_refreshing(self, refresh: Callable[[RolloutWorker], Awaitable[None]]) -> None:
        while True:
            shard = await self._stale.get()
            await self._unless_dead(shard, refresh(shard))

    async def _replace(self, number: int) -> None:
        """Start another worker. While others live, one that cannot be takes nothing from the restarts, as with engines."""
        pause = RETRY_SECONDS[0]
        while self._restarts:
            self._restarts, self._coming = self._restarts - 1, self._coming + 1
            try:
                shard = await self._wait(self._start(number), "respawn", "a new rollout worker")
            except (WorkerDied, StallError) as error:
                self._coming -= 1
                self._give_up_if_empty(WorkerDied(str(error)))
                self._on_loss(f"no rollout worker takes the place of one that was lost yet: {error}")
                self._restarts += bool(self._shards)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
                continue
            self._coming -= 1
            self._add(shard)
            if self._lent:
                await self._unless_dead(shard, shard.ask("sleep_colocated"))
            self._stale.put_nowait(shard)
            return

    def _add(self, shard: RolloutWorker) -> None:
        shard.on_stale = self._stale.put_nowait
        self._shards.append(shard)
        self._ever.append(shard)
        self._arrived.set()

    def _lose(self, shard: RolloutWorker, error: WorkerDied) -> None:
        """Go on without a worker; raise `error` if it was the last and none will take its place."""
        if shard in self._shards:
            self._shards.remove(shard)
            shard.kill()
            self._lost.put_nowait(shard.number)
            self._on_loss(f"{error}; rollout workers left: {len(self._shards)}")
        self._give_up_if_empty(error)

    def _give_up_if_empty(self, error: WorkerDied) -> None:
        if not (self._shards or self._restarts or self._coming):
            raise error

    # --- as what runs episodes -----------------------------------------------------------------------------------------

    async def run(
        self,
        prompt: Prompt,
        attempt: AttemptId,
        started: PolicyVersion,
        sampling: Sampling | None = None,
        priority: int = 0,
    ) -> Trajectory:
        """As `EpisodeRunner.run` and, where siblings are judged together, as `GroupScoring.run`. What comes back is durable."""
        return await self._ask(str(attempt.group), "run", prompt, attempt, started, sampling, priority)

    async def generate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling | None = None
    ) -> UnscoredAttempt:
        """See `EpisodeRunner.generate`."""
        return await self._ask(str(attempt.group), "generate", prompt, attempt, started, sampling)

    async def score(self, played: UnscoredAttempt) -> Trajectory:
        """See `EpisodeRunner.score`. What comes back is durable."""
        return await self._ask(str(played.attempt.group), "score", played)

    async def _ask(self, group: str, method: str, *args: Any) -> Any:
        """The answer of the worker that has the group; of another if that one dies."""
        while True:
            shard = await self._home(group)
            shard.open[group] += 1
            try:
                return await shard.ask(method, *args)
            except WorkerDied as error:
                self._lose(shard, error)
            finally:
                shard.open[group] -= 1
                if not shard.open[group]:
                    del shard.open[group]

    async def _home(self, group: str) -> RolloutWorker:
        """Where siblings are; else the worker with the fewest open attempts an engine."""
        while not self._shards:
            self._arrived.clear()
            await self._wait(self._arrived.wait(), "worker", "a rollout worker to take the place of the last")
        having = [shard for shard in self._shards if group in shard.open]
        return min(having or self._shards, key=lambda shard: shard.open.total() / max(shard.counts.engines, 1))
