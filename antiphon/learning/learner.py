"""The learner as the controller sees it: the protocol, and the one that runs in a worker."""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import AntiphonError, RecordError
from antiphon.core.registry import Registry
from antiphon.core.types import FloatArray, Pack, TrainBatch, WeightsUpdate
from antiphon.core.workers import WorkerHandle
from antiphon.learning.config import CriticConfig, LearnerConfig, OptimizerConfig
from antiphon.record.checkpoint import CRITICS
from antiphon.weights.base import TransferContext

SAVED = ""  # what a learner worker emits when its part of a checkpoint is written; else why it is not
LEARNERS = Registry(
    "learner",
    {
        "torch": "antiphon.learning.torch_learner:TorchLearner",
        "deepspeed": "antiphon.learning.backends.deepspeed:DeepSpeedLearner",
        "megatron": "antiphon.learning.backends.megatron:MegatronLearner",
    },
)
# Modules of the learners that do not train a policy by reinforcement learning, by name of their class.
OBJECTIVES = {
    "CriticLearner": "critic",
    "PreferenceLearner": "pairs",
    "RewardLearner": "pairs",
    "DistillationLearner": "distill",
    "Teacher": "distill",
}


def objective_learner(name: str, kind: str) -> str:
    """Return package.module:class of a learner of `OBJECTIVES`, of a built-in kind (`learner.kind`)."""
    module = f"objectives.{OBJECTIVES[name]}" if kind == "torch" else f"backends.{kind}_objectives"
    return f"antiphon.learning.{module}:{name}"


class Predictor(Protocol):
    """A model that is asked for its output on packs, and not trained."""

    async def predict(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """Return the model's output for the loss tokens, [T] a pack: log-probs of a policy, values of a critic."""


class Offloadable(Predictor, Protocol):
    """A model whose device others may use too."""

    async def offload(self) -> None:
        """Leave the device to others until `reload`; nothing is asked of it in the meantime."""

    async def reload(self) -> None:
        """Come back to the device."""


class Trainer(Predictor, Protocol):
    """The methods of a `Learner` that a training step needs."""

    async def step(self, batch: TrainBatch) -> dict[str, float]:
        """Do every update of the batch; returns metrics."""

    async def logprobs_and_entropies(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """Return log-prob and entropy of each loss token, [T, 2] a pack."""

    async def attention_stats(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """WAAD and FAI of the loss tokens by the model's attention, [T, 2] a pack; see `learning.model.attention_stats`."""


class Learner(Trainer, Offloadable, Protocol):
    """Holds a model; turns batches into updates of it."""

    async def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """Start a phase with a fresh optimiser; returns the number of trained parameters."""

    async def publish(self, version: int, transfer: TransferContext) -> WeightsUpdate:
        """Publish the current weights as `version`, for engines to load."""

    async def save(self, place: Path) -> asyncio.Future[None]:
        """Begin to write all that a checkpoint needs of it into `place`.

        Training may go on when this returns; the future ends when it is there.
        """

    async def restore(self, directory: Path) -> None:
        """Go on from a checkpoint, after `begin`."""


@dataclass(slots=True, kw_only=True)
class ModelRoles:
    """The models of a run by their roles."""

    learner: Learner
    reference: Offloadable | None = None
    critics: Sequence[Learner] = ()
    teachers: Sequence[Offloadable] = ()

    async def begin(
        self, algorithm: AlgorithmConfig, config: LearnerConfig, critic: CriticConfig | None, steps: int
    ) -> None:
        """Start reinforcement learning of so many training steps, in the first of which only critics may learn."""
        alone = critic.warmup_steps if critic else 0
        await self.learner.begin(algorithm, config.optimizer, (steps - alone) * config.updates)
        for learner in self.critics:
            assert critic is not None
            await learner.begin(algorithm, critic.optimizer, steps * config.updates)

    async def save(self, place: Path) -> Sequence[asyncio.Future[None]]:
        """Begin to save all models that learn; return a future for each."""
        return await asyncio.gather(*(learner.save(part) for learner, part in self._parts(place)))

    async def restore(self, checkpoint: Path) -> None:
        """Restore all models that learn from a checkpoint."""
        await asyncio.gather(*(learner.restore(part) for learner, part in self._parts(checkpoint)))

    async def offload(self) -> None:
        """Offload all models."""
        await asyncio.gather(*(model.offload() for model in self._all()))

    async def reload(self) -> None:
        """Reload all models."""
        await asyncio.gather(*(model.reload() for model in self._all()))

    def _all(self) -> Sequence[Offloadable]:
        reference = () if self.reference is None else (self.reference,)
        return (self.learner, *self.critics, *reference, *self.teachers)

    def _parts(self, checkpoint: Path) -> Iterator[tuple[Learner, Path]]:
        """Yield each model that learns, and its part of a checkpoint."""
        yield self.learner, checkpoint
        for number, critic in enumerate(self.critics):
            yield critic, checkpoint / CRITICS / str(number)


class WorkerLearner:
    """A `Learner` behind a `WorkerHandle`."""

    def __init__(self, handle: WorkerHandle) -> None:
        self._handle = handle
        self._saving: deque[tuple[asyncio.Future[None], Path]] = deque()
        handle.on_event(self._saved)
        handle.on_death(self._died)

    async def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """Start a phase with a fresh optimiser; return the number of trained parameters."""
        parameters: int = await self._handle.call("begin", algorithm, optimizer, total_updates)
        return parameters

    async def step(self, batch: TrainBatch) -> dict[str, float]:
        """Do every update of the batch; return metrics."""
        metrics: dict[str, float] = await self._handle.call("step", batch)
        return metrics | {"tokens": float(batch.tokens)}

    async def predict(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """Return the model's output for the loss tokens, [T] a pack."""
        predicted: list[FloatArray] = await self._handle.call("predict", list(packs))
        return predicted

    async def logprobs_and_entropies(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """Return log-prob and entropy of each loss token, [T, 2] a pack."""
        measured: list[FloatArray] = await self._handle.call("logprobs_and_entropies", list(packs))
        return measured

    async def attention_stats(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """Return WAAD and FAI of the loss tokens, [T, 2] a pack."""
        attended: list[FloatArray] = await self._handle.call("attention_stats", list(packs))
        return attended

    async def predict_base(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """Return log-probs under the model without its adapters, [T] a pack."""
        predicted: list[FloatArray] = await self._handle.call("predict_base", list(packs))
        return predicted

    async def publish(self, version: int, transfer: TransferContext) -> WeightsUpdate:
        """Publish the model's weights as `version`, for engines to load."""
        update: WeightsUpdate = await self._handle.call("publish", version, transfer)
        return update

    async def save(self, place: Path) -> asyncio.Future[None]:
        """Begin to save; return a future that ends when everything is written."""
        saving = asyncio.get_running_loop().create_future()
        self._saving.append((saving, place))
        await self._handle.call("save", place)
        return saving

    async def restore(self, directory: Path) -> None:
        """Continue from a checkpoint, after `begin`."""
        await self._handle.call("restore", directory)

    async def offload(self) -> None:
        """Leave the device to others."""
        await self._handle.call("offload")

    async def reload(self) -> None:
        """Come back to the device."""
        await self._handle.call("reload")

    def _saved(self, outcome: str) -> None:
        saving, place = self._saving.popleft()
        if outcome == SAVED:
            succeed(saving, None)
        else:
            fail(saving, RecordError(outcome, path=place))

    def _died(self, error: AntiphonError) -> None:
        while self._saving:
            fail(self._saving.popleft()[0], error)


class LoraBaseReference:
    """The model below a learner's adapters, as a reference: no second copy of it is held."""

    def __init__(self, learner: WorkerLearner) -> None:
        self._learner = learner

    async def predict(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """Return log-probs of the loss tokens, [T] a pack."""
        return await self._learner.predict_base(packs)

    async def offload(self) -> None:
        """Do nothing: the learner leaves the device itself."""

    async def reload(self) -> None:
        """Do nothing: the learner comes back itself."""
