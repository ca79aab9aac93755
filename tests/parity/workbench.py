"""A rank that is put into one mesh after another: to import torch takes longer than all else that is done here."""

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.types import Pack, Streams, TrainBatch, Update, WeightsUpdate
from antiphon.core.workers import Worker
from antiphon.learning.config import CriticConfig, LearnerConfig, OptimizerConfig
from antiphon.learning.learner import LEARNERS
from antiphon.learning.mesh import TIMEOUT
from antiphon.learning.model.loading import decoder_layers
from antiphon.learning.objectives.critic import CriticLearner
from antiphon.weights.base import TransferContext
from antiphon.weights.rendezvous import open_store

Arrays = dict[str, np.ndarray]
STEPS = 3


class Critic(CriticLearner):
    """With what a learner is opened with."""

    def __init__(self, model_path: str, config: LearnerConfig, seed: int) -> None:
        super().__init__(model_path, config, seed, CriticConfig())


class Workbench(Worker):
    """Has a learner at a time."""

    def host(self, address: str) -> str:
        """See `TorchLearner.host`."""
        self._store, where = open_store(address, TIMEOUT)
        return where

    def prepare(self, config: LearnerConfig) -> None:
        """Import what a learner needs, and begin to watch how much memory this process comes to have."""
        LEARNERS.resolve(config.kind)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _memory("VmRSS")

    def grown(self) -> tuple[int, int]:
        """Bytes of the weights that this rank has, and by how much more than before the process ever had since `prepare`."""
        return _bytes(list(self.learner.model.parameters())), _memory("VmHWM") - self._before

    def weights(self) -> Arrays:
        """All of the model, on the first rank."""
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in self.learner.shards.gather_parameters()}

    def open(self, model: str, config: LearnerConfig, rank: int, where: str) -> None:
        """Be a rank of a new learner."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        self.learner: Any = None
        # Of learners that a library still knows.
        self._others = {} if config.kind == "torch" else _storages()
        self.learner = LEARNERS.resolve(config.kind)(model, config, 0)
        if config.forms_group:
            self.learner.join(rank, where)

    def save(self, place: Path, algorithm: AlgorithmConfig, batch: TrainBatch) -> list[dict[str, float]]:
        """A checkpoint after a step and an update without one, and what the steps after it come to."""
        self.learner.begin(algorithm, self._adamw(), STEPS)
        self.learner.emit = self.emit
        self.learner._update(batch.updates[0])
        self.learner._update(_empty(batch.updates[0]))
        self.learner.save(place)
        self.learner._writer.finish()
        return [self.learner._update(batch.updates[0]) for _ in range(STEPS - 1)]

    def known_when_asked(self, how: list[str], algorithm: AlgorithmConfig, batch: TrainBatch) -> list[Arrays]:
        """What is published and saved after a step, and after each of these questions about its packs: weights, and what the
        optimiser keeps of each element."""
        learner, (update,) = self.learner, batch.updates
        learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3), STEPS)
        learner._update(update)
        found = []
        for question in ("", *how):
            if question:
                getattr(learner, question)(list(update.packs[learner.shards.data]))
            known = {name: tensor.detach() for name, tensor in learner.shards.gather_parameters()}
            cut = learner._snapshot()
            known |= {f"saved.{name}": tensor for name, tensor in cut.weights.items()}
            for name, kept in cut.training["moments"].items():
                known |= {f"{name}.{key}": value for key, value in kept.items()}
            found.append({name: tensor.float().numpy().copy() for name, tensor in known.items()})
        return found

    def cut(self, place: Path, algorithm: AlgorithmConfig, batch: TrainBatch) -> tuple[Arrays, int]:
        """A checkpoint after a step, of these weights; and how many tensors were whole at once, at most."""
        self.learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3), STEPS)
        self.learner.emit = self.emit
        self.learner._update(batch.updates[0])
        with self.whole_at_once() as most:
            self.learner.save(place)
        self.learner._writer.finish()
        return {name: tensor.detach().numpy().copy() for name, tensor in self.learner.shards.gather_parameters()}, max(
            most
        )

    def skip(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> tuple[list[float], Arrays, Arrays]:
        """Updates that are skipped, of three of which the second is not finite on the first rank's packs alone; the weights
        after these, and after the other two alone."""
        (good,) = batch.updates
        spoilt = tuple(replace(pack, coefficients=pack.coefficients * np.nan) for pack in good.packs[0])
        bad = replace(good, packs=(spoilt, *good.packs[1:]))
        start = {name: piece.detach().clone() for name, piece in self.learner.shards.local_parameters()}
        weights, skipped = list[Arrays](), list[float]()
        for updates in ((good, bad, good), (good, good)):
            with torch.no_grad():
                for name, piece in self.learner.shards.local_parameters():
                    piece.copy_(start[name])
            self.learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3), STEPS)
            skipped += [self.learner._update(update)["skipped_updates"] for update in updates]
            weights.append(
                {name: tensor.detach().numpy().copy() for name, tensor in self.learner.shards.gather_parameters()}
            )
        return skipped, *weights

    def publish(
        self, exchange: TransferContext, algorithm: AlgorithmConfig, batch: TrainBatch
    ) -> tuple[WeightsUpdate, int]:
        """The weights; and how many tensors were whole at once, at most."""
        with self.whole_at_once() as most:
            update = self.learner.publish(1, exchange)
        return update, max(most)

    @contextmanager
    def whole_at_once(self) -> Iterator[list[int]]:
        """How many tensors that ranks have put together are in memory, whenever one more is."""
        shards, memory, counts = self.learner.shards, list[StorageWeakRef](), [0]
        whole = shards.gather_tensor

        def watched(name: str, piece: torch.Tensor) -> torch.Tensor:
            found = whole(name, piece)
            memory.append(StorageWeakRef(found.untyped_storage()))
            counts.append(sum(not each.expired() for each in memory))
            return found

        shards.gather_tensor = watched
        yield counts
        shards.gather_tensor = whole

    def restore(self, place: Path, algorithm: AlgorithmConfig, batch: TrainBatch) -> list[dict[str, float]]:
        """What the steps after a checkpoint come to."""
        self.learner.begin(algorithm, self._adamw(), STEPS)
        self.learner.restore(place)
        return [self.learner._update(batch.updates[0]) for _ in range(STEPS - 1)]

    def rewrite(
        self, place: Path, same: Path, later: Path, algorithm: AlgorithmConfig, batch: TrainBatch
    ) -> dict[str, float]:
        """Go on from a checkpoint: the `same` once more, and a `later` one after a step; what that comes to."""
        self.learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3), STEPS)
        self.learner.emit = self.emit
        self.learner.restore(place)
        self.learner.save(same)
        metrics = self.learner._update(batch.updates[0])
        self.learner.save(later)
        self.learner._writer.finish()
        return metrics

    def leave(self, leaves: bool, algorithm: AlgorithmConfig, batch: TrainBatch) -> tuple[list[Any], Arrays, list[int]]:
        """Two updates and a checkpoint's copies, the device left and come back to in between or not: what they come to, the
        weights, and the bytes of the learner's tensors before and meanwhile."""
        self.learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3), STEPS)
        metrics, held = [self.learner._update(batch.updates[0])], [self._held()]
        for _ in range(2 if leaves else 0):
            self.learner.offload()
            held.append(self._held())
            self.learner.reload()
            self.learner._snapshot()
        return [*metrics, self.learner._update(batch.updates[0])], self.weights(), held

    def _held(self) -> int:
        """Bytes of all tensors that are there since the learner was opened."""
        return sum(storage.nbytes() for key, storage in _storages().items() if key not in self._others)

    def _adamw(self) -> OptimizerConfig:
        """AdamW with moments as the learner is configured."""
        return OptimizerConfig(learning_rate=1e-3, moments=self.learner.config.optimizer.moments)

    def descend(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> None:
        """Steps of plain descent."""
        self.learner.begin(algorithm, OptimizerConfig(), STEPS)
        with self.plain_descent():
            for _ in range(STEPS):
                self.learner._update(batch.updates[0])

    def idle(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> tuple[list[dict[str, float]], list[bool]]:
        """What updates say of which some have no packs, and whether each has moved anything."""
        learner, (update,) = self.learner, batch.updates
        learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, schedule="linear"), 5)
        said, moved = [], []
        for each in (_empty(update), update, update, _empty(update), update):
            shards = learner.shards
            before = {name: shards.gather_tensor(name, piece).clone() for name, piece in shards.local_parameters()}
            said.append(learner._update(each) | {"lr": learner.scheduler.get_last_lr()[0]})
            after = {
                name: learner.shards.gather_tensor(name, piece) for name, piece in learner.shards.local_parameters()
            }
            moved.append(any(not torch.equal(after[name], before[name]) for name in after))
        return said, moved

    def hold(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> tuple[int, int]:
        """Bytes of the weights and of the moments that this rank has after an update."""
        self.learner.begin(algorithm, self._adamw(), STEPS)
        self.learner._update(batch.updates[0])
        states = self.learner.optimizer.state.values()
        moments = [value for state in states for key, value in state.items() if key.startswith("exp_avg")]
        return _bytes(list(self.learner.model.parameters())), _bytes(moments)

    def whole_layers(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> list[int]:
        """Of how many layers this rank has all parameters while it computes each, forwards."""
        learner, found = self.learner, list[int]()
        layers = [layer for layer in decoder_layers(learner.model) if not isinstance(layer, torch.nn.Identity)]

        def look(*_: object) -> None:
            whole = (not any(isinstance(each, DTensor) for each in layer.parameters()) for layer in layers)
            found.append(sum(whole))

        for layer in layers:
            layer.register_forward_pre_hook(look)
        self.begin(algorithm)
        learner.predict(list(batch.updates[0].packs[learner.shards.data]))
        return found

    def begin(self, algorithm: AlgorithmConfig) -> None:
        """Be ready to be asked."""
        self.learner.begin(algorithm, OptimizerConfig(), STEPS)

    def predict(self, packs: list[Pack]) -> list[np.ndarray]:
        """See `TorchLearner.predict`."""
        return self.learner.predict(packs)

    def teach(self, packs: list[Pack]) -> list[Streams]:
        """See `objectives.distill.Teacher.teach`."""
        return self.learner.teach(packs)

    def predict_base(self, packs: list[Pack]) -> list[np.ndarray]:
        """See `TorchLearner.predict_base`."""
        return self.learner.predict_base(packs)

    def attention_stats(self, packs: list[Pack]) -> list[np.ndarray]:
        """See `TorchLearner.attention_stats`."""
        return self.learner.attention_stats(packs)

    def train(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> dict[str, Any]:
        """What comes of a batch's first update: its gradient, what plain descent moves them by, the losses of AdamW's."""
        learner = self.learner
        update = batch.updates[0]
        initial = {
            name: learner.shards.gather_tensor(name, piece).clone() for name, piece in learner.shards.local_parameters()
        }
        learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.3), STEPS)
        gradient = self.gradient(update)
        began = self.weights()
        with self.plain_descent():
            plain = [learner._update(update) for _ in range(STEPS)]
        moved = {name: array - began[name] for name, array in self.weights().items()}
        for name, piece in learner.shards.local_parameters():
            learner.shards.scatter_tensor(name, piece, initial[name])
        learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5), STEPS)
        curve = list(
            itertools.chain.from_iterable((m["loss"], m["grad_norm"]) for m in map(learner._update, [update] * STEPS))
        )
        return {"plain": plain, "gradient": gradient, "moved": moved, "curve": curve}

    def gradient(self, update: Update) -> Arrays:
        """Of an update that is not made."""
        learner = self.learner
        learner.shards.train_packs(update.packs[learner.shards.data], learner._pipeline_forward, learner._backward)
        learner.shards.clip_gradient(1e9)  # which completes it
        found = {name: learner.shards.gather_tensor(name, piece).numpy().copy() for name, piece in self.gradients()}
        learner.optimizer.zero_grad()
        return found

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's pieces of them."""
        return ((name, p.grad) for name, p in self.learner.model.named_parameters() if p.grad is not None)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of this rank."""
        yield from self.learner.model.parameters()

    @contextmanager
    def plain_descent(self) -> Iterator[None]:
        """Have SGD make the updates meanwhile."""
        learner = self.learner
        learner.optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        learner.scheduler = torch.optim.lr_scheduler.LambdaLR(learner.optimizer, lambda step: 1.0)
        yield


def _empty(update: Update) -> Update:
    """Of as many ranks, without packs."""
    return replace(update, packs=((),) * len(update.packs))


def _bytes(tensors: list[torch.Tensor]) -> int:
    here = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.nbytes for tensor in here)


def _storages() -> dict[int, torch.UntypedStorage]:
    """The storages that tensors of this process have."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and not isinstance(each, DTensor) and each.device.type != "meta":
            storage = each.untyped_storage()
            found[storage._cdata] = storage
    return found


def _memory(which: str) -> int:
    """Bytes that Linux counts of this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024
