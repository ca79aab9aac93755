"""The models that a run trains, behind one interface wherever they run.

`LocalTraining` has them in workers of this process; `learning.remote.RemoteTrainer` calls a `LocalTraining` in a process on
the learner's node.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.rewards import AlgorithmState
from antiphon.core.types import Credit, Group, TrainBatch, WeightsUpdate
from antiphon.core.workers import WorkerHandle
from antiphon.learning.config import CriticConfig, LearnerConfig, OptimizerConfig
from antiphon.learning.learner import ModelRoles
from antiphon.learning.step import StepPipeline, Wait, wait_forever
from antiphon.weights.base import TransferContext

Fetch = Callable[[Sequence[Group]], Sequence[Group]]  # returns groups with their payloads


def identity(groups: Sequence[Group]) -> Sequence[Group]:
    """Return groups as they are."""
    return groups


class StepResult(NamedTuple):
    """Outcome of one training step."""

    metrics: dict[str, float]
    digest: str  # of the batches that the learner was given
    algorithm_state: AlgorithmState  # after the step
    credit: Sequence[Credit] = ()  # what became of each trajectory


class TrainBackend:
    """All that a run does with its models. Nothing but the run's `WeightPublisher` and `SharedDevices` call it."""

    async def begin(
        self, algorithm: AlgorithmConfig, config: LearnerConfig, critic: CriticConfig | None, steps: int
    ) -> None:
        """Start reinforcement learning of `steps` training steps with fresh optimisers."""
        raise NotImplementedError

    async def begin_supervised(self, optimizer: OptimizerConfig, updates: int) -> None:
        """Start supervised fine-tuning of `updates` updates with a fresh optimiser."""
        raise NotImplementedError

    async def learn(
        self, number: int, version: int, groups: Sequence[Group], algorithm_state: AlgorithmState
    ) -> StepResult:
        """Take training step `number`, which begins at `version`, through its stages."""
        raise NotImplementedError

    async def step(self, batch: TrainBatch) -> dict[str, float]:
        """Do the updates of a batch; returns metrics."""
        raise NotImplementedError

    async def publish(self, version: int, transfer: TransferContext) -> WeightsUpdate:
        """Make the learner's weights available to engines as `version`."""
        raise NotImplementedError

    async def save(self, place: Path) -> None:
        """Begin to write a checkpoint of all models that learn into `place`; training may go on when this returns."""
        raise NotImplementedError

    async def wait_saved(self) -> None:
        """Return when the checkpoint that `save` began is written."""
        raise NotImplementedError

    async def restore(self, checkpoint: Path) -> None:
        """Load a checkpoint into all models that learn, after `begin`."""
        raise NotImplementedError

    async def offload(self) -> None:
        """Leave the devices to others until `reload`."""
        raise NotImplementedError

    async def reload(self) -> None:
        """Come back to the devices."""
        raise NotImplementedError

    async def died(self) -> None:
        """Return never; raise `WorkerDiedError` when a process of a model ends."""
        raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class LocalTraining(TrainBackend):
    """Models in workers of this process.

    Args:
        models: The models by their roles.
        pipeline: The stages of a step.
        workers: Processes of the models, whose death is the run's.
        wait: Bounds each stage of a step.
        fetch: Returns groups with their payloads, if these do not travel with them.
    """

    models: ModelRoles
    pipeline: StepPipeline
    workers: Sequence[WorkerHandle] = ()
    wait: Wait = wait_forever
    fetch: Fetch = identity
    _saving: Sequence[asyncio.Future[None]] = field(default=(), init=False)

    @override
    async def begin(
        self, algorithm: AlgorithmConfig, config: LearnerConfig, critic: CriticConfig | None, steps: int
    ) -> None:
        await self.models.begin(algorithm, config, critic, steps)

    @override
    async def begin_supervised(self, optimizer: OptimizerConfig, updates: int) -> None:
        await self.models.learner.begin(AlgorithmConfig(loss="sft"), optimizer, updates)

    @override
    async def learn(
        self, number: int, version: int, groups: Sequence[Group], algorithm_state: AlgorithmState
    ) -> StepResult:
        self.pipeline.algorithm_state = algorithm_state
        metrics, digest, credit = await self.pipeline.learn(number, version, self.fetch(groups), self.wait)
        return StepResult(metrics, digest, self.pipeline.algorithm_state, credit)

    @override
    async def step(self, batch: TrainBatch) -> dict[str, float]:
        return await self.models.learner.step(batch)

    @override
    async def publish(self, version: int, transfer: TransferContext) -> WeightsUpdate:
        return await self.models.learner.publish(version, transfer)

    @override
    async def save(self, place: Path) -> None:
        self._saving = await self.models.save(place)
        for role in self.pipeline.roles.values():
            await role.save(place)

    @override
    async def wait_saved(self) -> None:
        await asyncio.gather(*self._saving)

    @override
    async def restore(self, checkpoint: Path) -> None:
        await self.models.restore(checkpoint)
        for role in self.pipeline.roles.values():
            await role.restore(checkpoint)

    @override
    async def offload(self) -> None:
        await self.models.offload()

    @override
    async def reload(self) -> None:
        await self.models.reload()

    @override
    async def died(self) -> None:
        async with asyncio.TaskGroup() as owner:
            for worker in self.workers:
                owner.create_task(worker.died(), name=f"watch {worker.name}")
