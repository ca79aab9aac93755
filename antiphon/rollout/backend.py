"""Rollouts behind one interface, wherever they run.

`LocalRollouts` has engines, episodes and judges in this process; `rollout.remote_workers.RolloutWorkers` divides them among
processes, of which each has a `LocalRollouts`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from antiphon.core.profiles import Profiled
from antiphon.core.types import AttemptId, OnUpdate, PolicyVersion, Prompt, Sampling, Trajectory, WeightsUpdate
from antiphon.rollout.attempt import AttemptRunner, UnscoredAttempt
from antiphon.rollout.engine_state import PoolLoad
from antiphon.rollout.episode import EpisodeRunner
from antiphon.rollout.pool import EnginePool

EVALUATION_PRIORITY = -1  # before rollouts: training waits for it


class WeightReceiver(Protocol):
    """An engine, or a rollout worker with its engines, as a receiver of weights."""

    @property
    def version(self) -> int:
        """Number of the version that it holds."""

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load published weights."""


Store = Callable[[Trajectory], Awaitable[Trajectory]]
Refresh = Callable[[WeightReceiver], Awaitable[None]]  # loads the current weights into a replacement


async def keep_weights(receiver: WeightReceiver) -> None:
    """Leave a replacement with the weights that it started with."""


class RolloutBackend:
    """All that a run does with its engines and episodes."""

    @property
    def engines(self) -> int:
        """Number of live engines."""
        raise NotImplementedError

    @property
    def generated_tokens(self) -> int:
        """Number of tokens sampled so far."""
        raise NotImplementedError

    @property
    def requeued_tokens(self) -> int:
        """Number of tokens that engines read again because others had died or were asleep."""
        raise NotImplementedError

    def describe_load(self) -> PoolLoad:
        """Return what each engine does now."""
        raise NotImplementedError

    async def run(self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion) -> Trajectory:
        """Run one attempt to its score."""
        raise NotImplementedError

    async def generate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling | None = None
    ) -> UnscoredAttempt:
        """Run one attempt to the end of its episode, without a score."""
        raise NotImplementedError

    async def score(self, unscored: UnscoredAttempt) -> Trajectory:
        """Score what `generate` returned."""
        raise NotImplementedError

    async def evaluate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling
    ) -> Trajectory:
        """Run one attempt of an evaluation, before rollouts that wait."""
        raise NotImplementedError

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load new weights into every engine; returns when all sample from them."""
        raise NotImplementedError

    async def release_devices(self) -> None:
        """Put engines and judges to sleep that share a device with the learner."""
        raise NotImplementedError

    async def reclaim_judges(self) -> None:
        """Wake judges that sleep. Engines wake as they load new weights, or with `reclaim_engines`."""
        raise NotImplementedError

    async def reclaim_engines(self) -> None:
        """Wake engines that sleep, with the weights they have."""
        raise NotImplementedError

    async def start_profile(self, memory: bool) -> None:
        """Begin to profile engines and graders; see `core.profiles.Profiled`."""
        raise NotImplementedError

    async def write_profile(self, folder: Path, prefix: str) -> None:
        """Write these profiles."""
        raise NotImplementedError

    async def watch(self, refresh: Refresh = keep_weights) -> None:
        """Replace engines that die or hang, with weights from `refresh`; runs until it is cancelled.

        Raises:
            WorkerDiedError: No engine is left, and none will come.
        """
        raise NotImplementedError


class LocalRollouts(RolloutBackend):
    """Engines, episodes and judges of this process."""

    def __init__(
        self,
        pool: EnginePool,
        episodes: EpisodeRunner,
        *,
        group_scoring: AttemptRunner | None = None,
        judges: Sequence[EnginePool] = (),
        profiled: Sequence[Profiled] = (),
    ) -> None:
        """Run attempts with `group_scoring`, where siblings are scored together, and else with `episodes`."""
        self.store: Store | None = None  # keeps payloads elsewhere, and returns trajectories that refer to them
        self._pool = pool
        self._episodes = episodes
        self._attempts: AttemptRunner = group_scoring or episodes
        self._judges = judges
        self._profiled = profiled

    @property
    @override
    def engines(self) -> int:
        return self._pool.engines

    @property
    @override
    def generated_tokens(self) -> int:
        return self._pool.generated_tokens

    @property
    @override
    def requeued_tokens(self) -> int:
        return self._pool.requeued_tokens

    @override
    def describe_load(self) -> PoolLoad:
        return self._pool.describe_load()

    @property
    def version(self) -> int:
        """Number of the version that every engine holds, or of an older one."""
        return self._pool.version

    @override
    async def run(self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion) -> Trajectory:
        return await self._stored(await self._attempts.run(prompt, attempt, started))

    @override
    async def generate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling | None = None
    ) -> UnscoredAttempt:
        return await self._attempts.generate(prompt, attempt, started, sampling)

    @override
    async def score(self, unscored: UnscoredAttempt) -> Trajectory:
        return await self._stored(await self._attempts.score(unscored))

    async def _stored(self, trajectory: Trajectory) -> Trajectory:
        return trajectory if self.store is None else await self.store(trajectory)

    @override
    async def evaluate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling
    ) -> Trajectory:
        trajectory = await self._episodes.run(prompt, attempt, started, sampling, EVALUATION_PRIORITY)
        return trajectory if self.store is None else replace(trajectory, payload=())

    @override
    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        await self._pool.load(update, mode)

    async def load_stale(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load weights into the engines that lack them; those asleep stay asleep."""
        await self._pool.load_stale(update, mode)

    @override
    async def release_devices(self) -> None:
        await asyncio.gather(*(pool.sleep_colocated() for pool in (self._pool, *self._judges)))

    @override
    async def reclaim_judges(self) -> None:
        await asyncio.gather(*(judge.wake_all() for judge in self._judges))

    @override
    async def reclaim_engines(self) -> None:
        await self._pool.wake_all()

    @override
    async def start_profile(self, memory: bool) -> None:
        await asyncio.gather(*(each.start_profile(memory) for each in self._profiled))

    @override
    async def write_profile(self, folder: Path, prefix: str) -> None:
        await asyncio.gather(*(each.write_profile(folder, prefix) for each in self._profiled))

    @override
    async def watch(self, refresh: Refresh = keep_weights) -> None:
        async with asyncio.TaskGroup() as owner:
            owner.create_task(self._pool.watch(refresh), name="watch engines")
            for judge in self._judges:
                owner.create_task(judge.watch(), name="watch judges")
