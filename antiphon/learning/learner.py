"""The learner as the controller sees it: the protocol, and the one that runs in a worker."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.errors import AntiphonError, RecordError
from antiphon.learning.config import OptimizerConfig
from antiphon.registry import Registry
from antiphon.types import FloatArray, Pack, TrainBatch, WeightsUpdate
from antiphon.waits import fail, succeed
from antiphon.workers import WorkerHandle

SAVED = ""  # what a learner worker emits when a checkpoint is in place; else why it is not
LEARNERS = Registry("learner", {"torch": "antiphon.learning.torch_learner:TorchLearner"})


class Trainer(Protocol):
    """What the stages of a step need of a `Learner`."""

    async def step(self, batch: TrainBatch) -> dict[str, float]:
        """Do every update of the batch; returns metrics."""

    async def score(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """Log-probs of the loss tokens under the model, [T] a pack."""

    async def attend(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """WAAD and FAI of the loss tokens by the model's attention, [T, 2] a pack; see `learning.rhythm`."""


class Learner(Trainer, Protocol):
    """Holds a model; turns batches into updates of it."""

    async def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """Start a phase with a fresh optimiser; returns the number of trained parameters."""

    async def publish(self, version: int, directory: Path) -> WeightsUpdate:
        """Write the weights where engines can read them."""

    async def save(self, directory: Path, state: Mapping[str, Any]) -> asyncio.Future[None]:
        """Begin to write a checkpoint, a whole one or none. Training may go on when this returns; the future ends when the
        checkpoint is in place."""

    async def restore(self, directory: Path) -> None:
        """Go on from a checkpoint, after `begin`."""


class WorkerLearner:
    """A `Learner` behind a `WorkerHandle`."""

    def __init__(self, handle: WorkerHandle) -> None:
        self._handle = handle
        self._saving: deque[asyncio.Future[None]] = deque()
        handle.on_event(self._saved)
        handle.on_death(self._died)

    async def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """See `Learner.begin`."""
        parameters: int = await self._handle.call("begin", algorithm, optimizer, total_updates)
        return parameters

    async def step(self, batch: TrainBatch) -> dict[str, float]:
        """See `Learner.step`."""
        metrics: dict[str, float] = await self._handle.call("step", batch)
        return metrics

    async def score(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """See `Learner.score`."""
        scored: list[FloatArray] = await self._handle.call("score", list(packs))
        return scored

    async def attend(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """See `Learner.attend`."""
        attended: list[FloatArray] = await self._handle.call("attend", list(packs))
        return attended

    async def publish(self, version: int, directory: Path) -> WeightsUpdate:
        """See `Learner.publish`."""
        update: WeightsUpdate = await self._handle.call("publish", version, directory)
        return update

    async def save(self, directory: Path, state: Mapping[str, Any]) -> asyncio.Future[None]:
        """See `Learner.save`."""
        saving = asyncio.get_running_loop().create_future()
        self._saving.append(saving)
        await self._handle.call("save", directory, dict(state))
        return saving

    async def restore(self, directory: Path) -> None:
        """See `Learner.restore`."""
        await self._handle.call("restore", directory)

    def _saved(self, outcome: str) -> None:
        saving = self._saving.popleft()
        if outcome == SAVED:
            succeed(saving, None)
        else:
            fail(saving, RecordError(outcome))

    def _died(self, error: AntiphonError) -> None:
        while self._saving:
            fail(self._saving.popleft(), error)
