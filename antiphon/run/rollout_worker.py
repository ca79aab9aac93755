"""A rollout worker: what `start` starts beside the loop of a run, in a process and an event loop of its own.

Its engines, environments and graders are processes of its node. The controller asks questions, which are answered as they are
done; see `rollout.remote_workers`.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from antiphon.cluster.base import CLUSTERS, Cluster
from antiphon.cluster.devices import as_seen
from antiphon.cluster.placement import Placement, gpus_of
from antiphon.core.deadlines import Deadlines
from antiphon.core.rpc import STARTED, AsyncWorker, Handler
from antiphon.core.types import AttemptId, PolicyVersion, Prompt, Sampling, Trajectory
from antiphon.engines.base import InferenceEngine
from antiphon.record.events import RARE, Events
from antiphon.record.payloads import PayloadWriter
from antiphon.record.run_dir import RunLineage
from antiphon.rollout.attempt import AttemptRunner, UnscoredAttempt
from antiphon.rollout.episode import EpisodeRunner
from antiphon.rollout.pool import EnginePool
from antiphon.rollout.remote_workers import Counts
from antiphon.rollout.reward_monitor import text_statistics
from antiphon.run.config import RunConfig
from antiphon.run.device_assignment import DeviceAssignment
from antiphon.run.launch import make_group_scorer, start_graders, start_rollouts
from antiphon.run.loop import run_supervised

ENGINES = 1000  # that a worker may have in its life, for each to have a number of its own


class RolloutWorkerProcess(AsyncWorker):
    """Runs attempts on engines of its own."""

    def __init__(
        self,
        serial: int,
        model: str,
        config: RunConfig,
        seats: Sequence[DeviceAssignment],
        life: RunLineage,
        listening: bool,
    ) -> None:
        """`config` has as many engines as there are `seats`, whose GPUs are the only ones that are seen here;
        `listening` says whether anybody reads all events."""
        self._serial = serial
        self._model = Path(model)
        self._config = config
        gpus = gpus_of(seat.place for seat in seats)
        self._seats = [seat._replace(place=seat.place and as_seen(seat.place, gpus)) for seat in seats]
        self._record = life
        self._events = _Told(self._say, listening, serial * ENGINES)
        self._pool: EnginePool | None = None
        super().__init__()

    def _state(self) -> Counts:
        if (pool := self._pool) is None:
            return Counts()
        return Counts(pool.version, pool.engines, pool.generated_tokens, pool.requeued_tokens)

    async def _live(self) -> None:
        deadlines, config, (directory, lineage) = Deadlines(), self._config, self._record
        name = f"rollout-{self._serial}"
        async with AsyncExitStack() as stack:
            cluster: Cluster = CLUSTERS.resolve("local")(config.cluster, directory.logs / name)
            stack.push_async_callback(cluster.close)
            tell = partial(self._say, "message", STARTED)
            places = tuple(seat.place for seat in self._seats if seat.place)
            placement = Placement({"engine": places} if places else {})
            grading, _ = await stack.enter_async_context(start_graders(cluster, config, deadlines, tell, placement))
            self._pool, episodes, _ = await start_rollouts(
                cluster,
                self._model,
                grading,
                config,
                deadlines,
                self._events,
                stack,
                tell,
                seats=self._seats.__getitem__,
            )
            files = PayloadWriter(directory.rollouts, f"lineage-{lineage}-{name}", lineage)
            stack.push_async_callback(files.close)
            pool, player = self._pool, make_group_scorer(episodes, grading, config, deadlines) or episodes
            keeping = _Keeping(episodes, player, files)
            able: list[Handler] = [
                keeping.run,
                player.generate,
                keeping.score,
                pool.load,
                pool.load_stale,
                pool.sleep_colocated,
                pool.wake_all,
            ]
            does = {method.__name__: method for method in able} | {"health": partial(asyncio.sleep, 0)}
            await run_supervised([pool.watch(self._ask_for_weights)], partial(self._serve, does=does))

    async def _ask_for_weights(self, engine: InferenceEngine) -> None:
        self._say("stale")


class _Keeping:
    """Plays attempts, keeps what comes of them in `files`, and has references to it instead."""

    def __init__(self, episodes: EpisodeRunner, player: AttemptRunner, files: PayloadWriter) -> None:
        """`episodes` plays attempts of evaluations, `player` all others."""
        self._episodes = episodes
        self._player = player
        self._files = files

    async def run(
        self,
        prompt: Prompt,
        attempt: AttemptId,
        started: PolicyVersion,
        sampling: Sampling | None = None,
        priority: int = 0,
    ) -> Trajectory:
        """See `RolloutWorkers.run`. Of an evaluation nothing is kept but the meta."""
        if attempt.group < 0:
            return replace(await self._episodes.run(prompt, attempt, started, sampling, priority), payload=())
        return await self._keep(await self._player.run(prompt, attempt, started))

    async def score(self, played: UnscoredAttempt) -> Trajectory:
        """See `RolloutWorkers.score`."""
        return await self._keep(await self._player.score(played))

    async def _keep(self, trajectory: Trajectory) -> Trajectory:
        meta = replace(trajectory.meta, wording=text_statistics(trajectory.segments))
        return await self._files.keep(replace(trajectory, meta=meta))


class _Told(Events):
    """Events that the controller is told of."""

    def __init__(self, say: Callable[..., None], listening: bool, first: int) -> None:
        super().__init__()
        self.numbers = itertools.count(first)
        self._say = say
        self._listening = listening

    @property
    def on(self) -> bool:
        """See `Events.on`."""
        return self._listening

    def add(self, event: str, **what: Any) -> None:
        """See `Events.add`."""
        if self._listening or event in RARE:
            self._say("event", value=(event, what))
