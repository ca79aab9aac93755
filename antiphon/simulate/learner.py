"""A simulated learner: it takes time and computes nothing."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.config import Config
from antiphon.core.errors import StateError, WorkerDiedError
from antiphon.core.types import FloatArray, Pack, TrainBatch, WeightsUpdate
from antiphon.learning.config import OptimizerConfig
from antiphon.simulate.engine import SimulatedEngine
from antiphon.simulate.faults import Faults
from antiphon.weights.base import TransferContext

SLICES = 16  # of a training step; before each, the learner looks whether engines run


class LearnerSpeed(Config):
    """Speed of a simulated learner, in seconds."""

    step: float = Field(0.0, ge=0.0)
    """Seconds of a training step, whatever is in it."""
    per_token: float = Field(0.0, ge=0.0)
    """Seconds per token that is trained on."""
    parallel: float = Field(1.0, le=1.0)
    """Share of `per_token` that several devices divide among themselves; negative if they are slower than one."""
    publish: float = Field(0.0, ge=0.0)
    """Seconds to publish weights."""
    beside_engines: float = Field(1.0, gt=0.0)
    """Factor on a step's seconds while engines generate on the same machine."""


class SimulatedLearner:
    """A `Learner` that takes time and learns nothing. It shares its machine with `engines`."""

    def __init__(
        self, speed: LearnerSpeed, faults: Faults, engines: Callable[[], Sequence[SimulatedEngine]] = tuple
    ) -> None:
        self.speed = speed
        self.busy_seconds = 0.0
        self._faults = faults
        self._engines = engines

    async def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """Begin at update 0."""
        return 0

    async def step(self, batch: TrainBatch) -> dict[str, float]:
        """Take the time of a training step."""
        if self._faults.should_fail("learner.crash"):
            raise WorkerDiedError("the simulated learner crashed")
        seconds = await self._work(self.speed.step + self.speed.per_token * batch.tokens)
        self.busy_seconds += seconds
        return {"seconds": seconds, "tokens": float(batch.tokens)}

    async def _work(self, seconds: float) -> float:
        """Compute, in slices if engines may slow it down; returns the seconds that it took."""
        factor = self.speed.beside_engines
        slices, taken = (1 if factor == 1 else SLICES), 0.0
        self._notify_engines(True)
        for _ in range(slices):
            if any(engine.colocated and engine.running for engine in self._engines()):
                raise StateError("an engine runs on a device that the learner uses")
            is_slowed = any(engine.running for engine in self._engines())
            slice_seconds = seconds / slices * (factor if is_slowed else 1)
            taken += slice_seconds
            await asyncio.sleep(slice_seconds)
        self._notify_engines(False)
        return taken

    def _notify_engines(self, training: bool) -> None:
        for engine in self._engines():
            engine.share_machine(training)

    async def predict(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """Take a third of a step's time, as there is no backward pass."""
        await asyncio.sleep(self.speed.per_token * sum(len(pack.tokens) for pack in packs) / 3)
        return [np.zeros(len(pack.tokens), np.float32) for pack in packs]

    async def attention_stats(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """Take the time of a forward pass through two thirds of the layers."""
        await asyncio.sleep(self.speed.per_token * sum(len(pack.tokens) for pack in packs) * 2 / 9)
        return [np.zeros((len(pack.tokens), 2), np.float32) for pack in packs]

    async def logprobs_and_entropies(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """Take the time of `predict`."""
        return [np.stack([one, one], -1) for one in await self.predict(packs)]

    async def publish(self, version: int, transfer: TransferContext) -> WeightsUpdate:
        """Take the time to publish; nothing is written."""
        await asyncio.sleep(self.speed.publish)
        return WeightsUpdate(version=version, location=str(transfer.directory / f"{version}"), manifest=None)

    async def save(self, place: Path) -> asyncio.Future[None]:
        """Return a finished save; there are no weights to write."""
        saved = asyncio.get_running_loop().create_future()
        saved.set_result(None)
        return saved

    async def restore(self, directory: Path) -> None:
        """Do nothing: there is no state to restore."""

    async def offload(self) -> None:
        """Do nothing: there is no memory to free."""

    async def reload(self) -> None:
        """Do nothing: there is nothing to load."""
