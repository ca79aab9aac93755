"""Base of the learners on torch: packs in, an updated model out."""

import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.errors import NonFiniteError
from antiphon.core.optional_packages import import_optional
from antiphon.core.types import FloatArray, Pack, TrainBatch, Update
from antiphon.learning.checkpointed_learner import CheckpointedLearner
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.host_device_copy import mean_metrics, to_floats
from antiphon.learning.model.attention import PACKED_ATTENTION as PACKED_ATTENTION

NONFINITE_IN_A_ROW = 10  # skipped updates in a row after which the model counts as broken


class PackLearner(CheckpointedLearner):
    """Trains a model on packs: `begin` a phase, then `step` and `save`. Subclasses say what the model and its loss are."""

    def __init__(self, model_path: str, config: LearnerConfig, seed: int) -> None:
        self._skipped_in_a_row = 0  # updates whose gradients were not finite
        super().__init__(model_path, config, seed)

    def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """Start a training phase with a fresh optimizer and schedule; return the number of trained parameters."""
        self.algorithm = algorithm
        self._balance = algorithm.expert_balance
        self.optimizer_config = optimizer
        self.optimizer = self._optimizer(optimizer)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: learning_rate_factor(optimizer, n, total_updates)
        )
        # The first update may have no packs, and so make no step; torch would warn.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        return sum(math.prod(whole.shape) for _, whole in self.shards.gather_parameters(trained=True))

    def _optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        """Return a fresh optimiser."""
        # Those of one mesh: the optimiser takes no others at once.
        alike: dict[Any, list[torch.nn.Parameter]] = defaultdict(list)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                alike[getattr(parameter, "device_mesh", None)].append(parameter)
        groups = [{"params": own} for own in alike.values()]
        given = {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
        make = torch.optim.AdamW
        if config.moments == "8bit":
            import_optional("bitsandbytes", "optimizer.moments: 8bit")
            from antiphon.learning import adamw_8bit

            make = adamw_8bit.AdamW8bit
        # Fused: in one pass over the parameters, without temporaries.
        return make(groups, lr=config.learning_rate, fused=True, **given)

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Do every update of the batch; return mean metrics and the learning rate of the last update."""
        began = time.perf_counter()
        updates = [self._update(update) for update in batch.updates]
        skipped = sum(update.pop("skipped_updates") for update in updates)
        rate = {"lr": updates[-1]["lr"]} if updates else {}
        return mean_metrics(updates) | rate | {"skipped_updates": skipped, "seconds": time.perf_counter() - began}

    def predict(self, packs: list[Pack]) -> list[FloatArray]:
        """Return the model's output for the loss tokens, 0 elsewhere, [T] a pack: log-probs of a policy, values of a critic."""
        return self._query(packs, lambda outputs: outputs[0])

    def _query(self, packs: list[Pack], choose: Callable[[tuple[torch.Tensor, ...]], torch.Tensor]) -> list[FloatArray]:
        """Return what `choose` makes of the outputs for the loss tokens, [N, …], as [T, …] a pack with 0 elsewhere."""

        def ask(pack: Pack) -> FloatArray:
            chosen = choose(self.shards.run(self._forward, pack, self._targets(pack))).float().cpu().numpy()
            result = np.zeros((len(pack.tokens), *chosen.shape[1:]), dtype=np.float32)
            result[pack.loss_mask] = chosen
            return result

        with torch.no_grad():
            return self.shards.run_packs(packs, self._pipeline_forward, ask)

    def _backward(self, pack: Pack) -> dict[str, torch.Tensor]:
        """Add the gradient of a pack, unless gradients are off.

        Returns:
            Sums over its loss tokens, as from `sum_measures`.
        """
        raise NotImplementedError

    def _forward(self, pack: Pack, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model on a pack; return its outputs for the loss tokens [N], first the one that `predict` returns."""
        raise NotImplementedError

    # --- one update ----------------------------------------------------------------------------------------------------

    def _update(self, update: Update) -> dict[str, float]:
        self._sequences = update.sequences or 1
        self._balances.clear()
        sums: dict[str, torch.Tensor] = {}
        packs = update.packs[self.shards.data]
        for own in (
            *self._measure_forward_only(update),
            *self.shards.train_packs(packs, self._pipeline_forward, self._backward),
        ):
            for name, value in own.items():
                sums[name] = sums[name] + value if name in sums else value
        totals = self.shards.reduce_sums(to_floats(sums))
        # All ranks have equally many packs. Without packs, momentum and decay alone would change the weights: no step.
        norm = self._optimizer_step() if packs else 0.0
        made = math.isfinite(norm)  # all ranks agree: the norm is that of the whole gradient
        self._count_skipped(made, norm)
        metrics = {"lr": self.scheduler.get_last_lr()[0], "tokens": totals.pop("tokens", 0.0)}
        metrics["skipped_updates"] = float(not made)
        if made:
            self.scheduler.step()
        loss = totals.pop("loss", 0.0)
        if packs and made:
            metrics |= {"loss": loss, "grad_norm": norm}
            metrics |= {"expert_balance": self._mean_expert_balance()} if self._balance else {}
        metrics |= {name: value / max(metrics["tokens"], 1.0) for name, value in totals.items()}
        if metrics.get("mixed_share"):
            metrics["mixed_mismatch_kl"] /= metrics["mixed_share"]  # over the flagged tokens alone
        return metrics

    def _measure_forward_only(self, update: Update) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the measures of packs without gradient, which have no loss either."""
        packs = update.forward_only[self.shards.data] if update.forward_only else ()
        with torch.no_grad():
            for own in self.shards.run_packs(packs, self._pipeline_forward, self._backward) if packs else ():
                yield {name: value for name, value in own.items() if name != "loss"}

    def _count_skipped(self, made: bool, norm: float) -> None:
        """Count updates that were skipped in a row.

        Raises:
            NonFiniteError: The update must not be skipped.
        """
        self._skipped_in_a_row = 0 if made else self._skipped_in_a_row + 1
        said = f"the gradient norm is {norm}, and the update was not made"
        if not made and self.config.on_nonfinite == "fail":
            raise NonFiniteError(f"{said} (learner.on_nonfinite: fail)")
        if self._skipped_in_a_row >= NONFINITE_IN_A_ROW:
            raise NonFiniteError(f"{said}, as the {NONFINITE_IN_A_ROW - 1} before it (learner.on_nonfinite: skip)")

    def _mean_expert_balance(self) -> float:
        """Return the experts' balance loss of the update, a mean over sequences and layers."""
        total = float(sum(loss for balance in self._balances for loss in balance.found.values()))
        if self.mesh is not None:  # ranks that share packs have other layers, or have computed the same
            total = self.mesh.all_reduce([total])[0] / (self.config.mesh.context * self.config.mesh.tensor)
        return total / (self._sequences * len(self._layers_with_experts))

    def _optimizer_step(self) -> float:
        """Make a step if the gradient is finite; return its norm before clipping."""
        norm = self.shards.clip_gradient(self.optimizer_config.max_grad_norm)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


def learning_rate_factor(config: OptimizerConfig, update: int, total: int) -> float:
    """Learning rate at `update` of `total`, relative to its peak: linear warm-up, then the schedule."""
    if update < config.warmup_steps:
        return (update + 1) / config.warmup_steps
    progress = min((update - config.warmup_steps) / max(total - config.warmup_steps, 1), 1.0)
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - config.final_ratio) * progress
        case "cosine":
            return config.final_ratio + (1.0 - config.final_ratio) * (1 + math.cos(math.pi * progress)) / 2
