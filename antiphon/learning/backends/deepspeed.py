"""The learner on DeepSpeed: ZeRO cuts optimiser state, gradients and parameters among the ranks of `learner.mesh.shard`.

What the model computes, and what its loss is, stays the torch learner's. DeepSpeed has the ranks' gradients, the step of the
optimiser, and what of all this lies where. Its optimiser is torch's AdamW on flat float32 pieces, so a step is the same.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models".
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state
from torch import nn

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.config import parse, set_environment
from antiphon.core.errors import UnsupportedError
from antiphon.core.types import Pack
from antiphon.learning.backend_options import DeepSpeedOptions
from antiphon.learning.backends.offloaded_storages import OffloadableModel, OffloadingLearner, find_tensors
from antiphon.learning.checkpointed_learner import GatherTensor
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.parallel.whole_model import PipelineForward
from antiphon.learning.torch_learner import TorchLearner

T = TypeVar("T")

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names
BUCKET = 1 << 26  # elements of gradients that are summed at once


class ZeroModel(OffloadableModel):
    """This rank's share of a model that DeepSpeed has cut."""

    def _shard(self, config: LearnerConfig) -> None:
        device = next(self.model.parameters()).device
        if (chosen := get_accelerator().device_name()) != device.type:
            raise UnsupportedError(
                f"learner.device: {device.type!r}, and DeepSpeed has chosen {chosen!r}: set DS_ACCELERATOR",
                key="learner.device",
                value=device.type,
            )
        set_environment(LOCAL_RANK=str(device.index or 0))  # what its launcher would say
        # Collectives of its own for CPUs, which only its inference uses, are not to be compiled for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        warnings.filterwarnings(
            "ignore", "`torch.distributed", FutureWarning
        )  # it calls some things by their old names
        self._asked = _Asked(self.model)
        self.engine, self.zero, *_ = deepspeed.initialize(
            model=self._asked,
            optimizer=torch.optim.AdamW(_trained(self.model), lr=0.0, fused=True),  # all else is known at `begin`
            config=_settings(config),
            dist_init_required=False,
        )

    # --- computing -----------------------------------------------------------------------------------------------------

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of the model through the DeepSpeed engine."""
        self._asked.question = partial(function, *args)
        found: T = self.engine() if torch.is_grad_enabled() else self._asked()
        return found

    def train_packs(self, packs: Sequence[Pack], pass_on: PipelineForward, backward: Callable[[Pack], T]) -> list[T]:
        """Add the gradients of packs; the gradient is complete with the last pack."""
        found = []
        for number, pack in enumerate(packs, start=1):
            self.engine.set_gradient_accumulation_boundary(number == len(packs))
            found.append(backward(pack))
        return found

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss.

        DeepSpeed takes the mean over ranks, and a token's coefficient counts the tokens of all ranks already.
        """
        self.engine.backward(loss * self.mesh.config.shard)

    # --- reading and writing -------------------------------------------------------------------------------------------

    def gather_tensor(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Return a whole parameter. All ranks must call this."""
        with deepspeed.zero.GatheredParameters([piece]):
            return piece.detach().clone()

    def scatter_tensor(self, name: str, piece: torch.Tensor, whole: torch.Tensor) -> None:
        """Set a parameter from the whole of it, and the optimiser's copy in float32."""
        with deepspeed.zero.GatheredParameters([piece], modifier_rank=0):
            piece.detach().copy_(whole)
        if _is_cut(piece):
            deepspeed.utils.safe_set_local_fp32_param(piece, self._piece(whole, piece))
        else:
            deepspeed.utils.safe_set_full_fp32_param(piece, whole)

    def moment(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """Return the optimiser state of a parameter, whole. All ranks must call this."""
        found: torch.Tensor = deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
        return found

    def take_moment(self, parameter: torch.Tensor, key: str, whole: torch.Tensor) -> None:
        """Set this rank's piece of what the optimiser keeps of a parameter."""
        if _is_cut(parameter):
            deepspeed.utils.safe_set_local_optimizer_state(parameter, self._piece(whole, parameter), key)
        else:
            deepspeed.utils.safe_set_full_optimizer_state(parameter, whole, key)

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """Yield parameters, buffers, and whatever DeepSpeed's optimiser has."""
        for parameter in self.model.parameters():
            yield parameter
            yield from find_tensors([getattr(parameter, "ds_tensor", None), parameter.grad])
        yield from self.model.buffers()
        yield from find_tensors(vars(self.zero))
        for group in self.zero.optimizer.param_groups:
            yield from group["params"]
        yield from find_tensors(self.zero.optimizer.state)

    def scratch_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the buckets of gradients that ranks sum, and this rank's piece of the sums at stage 3."""
        yield from find_tensors([bucket.buffer for bucket in self.zero.ipg_buckets.values()])
        yield from find_tensors(getattr(self.zero, "grad_partitions_flat_buffer", None))

    def _piece(self, whole: torch.Tensor, parameter: Any) -> torch.Tensor:
        """This rank's piece of a tensor that is cut as a parameter is: flat, the last one filled up."""
        size = parameter.ds_tensor.numel()
        return F.pad(whole.flatten(), (0, size * self.mesh.config.shard - whole.numel())).split(size)[self.data]

    def forget(self) -> None:
        """Have the optimiser be as before its first step."""
        cut = hasattr(self.zero, "fp32_partitioned_groups_flat")  # stage 3
        pieces = self.zero.fp32_partitioned_groups_flat if cut else self.zero.single_partition_of_fp32_groups
        for number, piece in enumerate(pieces):
            state = {key: torch.zeros_like(piece) for key in MOMENTS} | {"step": torch.zeros((), device=piece.device)}
            self.zero.optimizer.state[piece] = state
            if not cut:
                lazy_init_hp_params_optimizer_state(self.zero.bit16_groups[number], piece, self.zero.optimizer.state)


class DeepSpeedBackend(OffloadingLearner):
    """A learner of any objective, whose model and optimiser are DeepSpeed's."""

    sharded = ZeroModel
    shards: ZeroModel
    loads_whole = True

    def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """Start a phase with a fresh optimiser; return the number of trained parameters."""
        self.shards.zero.clip_grad = optimizer.max_grad_norm
        super().begin(algorithm, optimizer, total_updates)
        return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in _trained(self.model))

    def _optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        self.shards.forget()
        found: torch.optim.Optimizer = self.shards.zero.optimizer
        for group in found.param_groups:
            group |= {
                "lr": config.learning_rate,
                "initial_lr": config.learning_rate,
                "betas": config.betas,
                "eps": config.eps,
                "weight_decay": config.weight_decay,
            }
        return found

    def _optimizer_step(self) -> float:
        engine = self.shards.engine
        engine.step()  # which makes none where the norm is not finite
        return float(engine.get_global_grad_norm())

    def _optimizer_moments(self) -> Iterator[tuple[str, dict[str, GatherTensor]]]:
        steps = next(iter(self.optimizer.state.values()))["step"]
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                found = {key: partial(self.shards.moment, parameter, key) for key in MOMENTS}
                yield name, {"step": lambda: steps} | found

    def _restore_moments(self, name: str, parameter: torch.Tensor, kept: dict[str, torch.Tensor]) -> None:
        for key in MOMENTS if kept else ():
            self.shards.take_moment(parameter, key, kept[key])
        for state in self.optimizer.state.values():
            state["step"].fill_(kept.get("step", 0))


class DeepSpeedLearner(DeepSpeedBackend, TorchLearner):
    """Trains a policy."""


class _Asked(nn.Module):
    """A model whose forward is what it is asked at the moment: DeepSpeed looks at forwards of modules alone."""

    question: Callable[[], Any]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Any:
        return self.question()


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _is_cut(parameter: torch.Tensor) -> bool:
    """Return True if each rank has a piece of the parameter (stage 3)."""
    return hasattr(parameter, "ds_tensor")


def _settings(config: LearnerConfig) -> dict[str, Any]:
    """DeepSpeed's own configuration."""
    stage = parse(DeepSpeedOptions, config.options).stage
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET}
    if config.cpu_offload:
        there = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        zero["offload_optimizer"] = there
        if stage == 3:
            zero["offload_param"] = there
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # until `begin`; it is 1 if nothing is said
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }
