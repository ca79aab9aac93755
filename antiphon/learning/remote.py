"""The trainer, as the controller sees it: the models of a run and the stages of its steps are there, next to each other; what
goes there are metas, and references to payloads. See `antiphon.run.trainer_process`."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.rewards import Controllers
from antiphon.core.rpc import Client
from antiphon.core.types import Group, TrainBatch, WeightsUpdate
from antiphon.core.workers import WorkerHandle
from antiphon.learning.config import CriticConfig, LearnerConfig, OptimizerConfig
from antiphon.learning.step import Wait
from antiphon.weights.base import TransferContext


class RemoteTrainer(Client):
    """What the loop has in the place of `ModelRoles` and of `StepPipeline`. The death of a model is its own."""

    def __init__(self, handle: WorkerHandle) -> None:
        super().__init__(handle)
        self.learner = RemoteLearner(self)
        self.controllers = Controllers()  # as the last step left them

    async def begin(
        self, algorithm: AlgorithmConfig, config: LearnerConfig, critic: CriticConfig | None, steps: int
    ) -> None:
        """See `ModelRoles.begin`."""
        await self.ask("begin", algorithm, config, critic, steps)

    async def learn(
        self, number: int, version: int, groups: Sequence[Group], wait: Wait
    ) -> tuple[dict[str, float], str]:
        """As `StepPipeline.learn`, of groups whose payloads are references; all stages are one wait."""
        work = self.ask("learn", number, version, groups, self.controllers)
        metrics, batch, self.controllers = await wait(work)
        return metrics, batch

    async def save(self, place: Path) -> Sequence[asyncio.Future[None]]:
        """See `ModelRoles.save`."""
        await self.ask("save", place)
        return [asyncio.ensure_future(self.ask("saved"))]

    async def restore(self, checkpoint: Path) -> None:
        """See `ModelRoles.restore`."""
        await self.ask("restore", checkpoint)

    async def offload(self) -> None:
        """See `ModelRoles.offload`."""
        await self.ask("offload")

    async def reload(self) -> None:
        """See `ModelRoles.reload`."""
        await self.ask("reload")


class RemoteLearner:
    """What the loop asks of the learner alone."""

    def __init__(self, trainer: Client) -> None:
        self._trainer = trainer

    async def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """See `Learner.begin`."""
        parameters: int = await self._trainer.ask("begin_learner", algorithm, optimizer, total_updates)
        return parameters

    async def step(self, batch: TrainBatch) -> dict[str, float]:
        """See `Trainer.step`."""
        metrics: dict[str, float] = await self._trainer.ask("step", batch)
        return metrics

    async def publish(self, version: int, exchange: TransferContext) -> WeightsUpdate:
        """See `Learner.publish`."""
        update: WeightsUpdate = await self._trainer.ask("publish", version, exchange)
        return update
