"""A rank that is put into one mesh after another: to import torch takes longer than all else that is done here."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.learner import LEARNERS
from antiphon.learning.mesh import TIMEOUT
from antiphon.types import Pack, TrainBatch, Update
from antiphon.weights.distributed import open_store
from antiphon.workers import Worker

Arrays = dict[str, np.ndarray]
STEPS = 3


class Workbench(Worker):
    """Has a learner at a time."""

    def host(self, address: str) -> str:
        """See `TorchLearner.host`."""
        self._store, where = open_store(address, TIMEOUT)
        return where

    def open(self, model: str, config: LearnerConfig, rank: int, where: str) -> None:
        """Be a rank of a new learner."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        self.learner = LEARNERS.resolve(config.kind)(model, config, 0)
        if config.mesh.world > 1:
            self.learner.join(rank, where)

    def save(self, place: Path, algorithm: AlgorithmConfig, batch: TrainBatch) -> list[dict[str, float]]:
        """A checkpoint after a step, and what the steps after it come to."""
        self.learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3), STEPS)
        self.learner.emit = self.emit
        self.learner._update(batch.updates[0])
        self.learner.save(place)
        self.learner._finish_writing()
        return [self.learner._update(batch.updates[0]) for _ in range(STEPS - 1)]

    def restore(self, place: Path, algorithm: AlgorithmConfig, batch: TrainBatch) -> list[dict[str, float]]:
        """What the steps after a checkpoint come to."""
        self.learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3), STEPS)
        self.learner.restore(place)
        return [self.learner._update(batch.updates[0]) for _ in range(STEPS - 1)]

    def hold(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> tuple[int, int]:
        """Bytes of the weights and of the moments that this rank has after an update."""
        self.learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3), STEPS)
        self.learner._update(batch.updates[0])
        moments = [value for state in self.learner.optimizer.state.values() for value in state.values() if value.dim()]
        return _bytes(list(self.learner.model.parameters())), _bytes(moments)

    def ask(self, algorithm: AlgorithmConfig, packs: list[Pack]) -> list[list[np.ndarray]]:
        """What is said of packs, and where attention can be read, its rhythm."""
        self.learner.begin(algorithm, OptimizerConfig(), STEPS)
        mesh = self.learner.config.mesh
        return [self.learner.score(packs), self.learner.attend(packs) if mesh.world == mesh.data else []]

    def train(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> dict[str, Any]:
        """What comes of a batch's first update: its gradient, what steps of plain descent move, the losses of AdamW's."""
        learner = self.learner
        update = batch.updates[0]
        initial = {name: tensor.clone() for name, tensor in learner.shards.named()}
        learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.3), STEPS)
        gradient = self.gradient(update)
        with self.plain_descent():
            plain = [learner._update(update) for _ in range(STEPS)]
        moved = {name: tensor.numpy().copy() for name, tensor in learner.shards.named()}
        for name, piece in learner.shards.pieces():
            learner.shards.take(name, piece, initial[name])
        learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5), STEPS)
        curve = list(
            itertools.chain.from_iterable((m["loss"], m["grad_norm"]) for m in map(learner._update, [update] * STEPS))
        )
        return {"plain": plain, "gradient": gradient, "moved": moved, "curve": curve}

    def gradient(self, update: Update) -> Arrays:
        """Of an update that is not made."""
        learner = self.learner
        learner.shards.train(update.packs[learner.shards.data], learner._pass_on, learner._backward)
        learner.shards.clip(1e9)  # which completes it
        found = {name: learner.shards.whole(name, piece).numpy().copy() for name, piece in self.gradients()}
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
        learner.optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        learner.scheduler = torch.optim.lr_scheduler.LambdaLR(learner.optimizer, lambda step: 1.0)
        yield


def _bytes(tensors: list[torch.Tensor]) -> int:
    here = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.nbytes for tensor in here)
