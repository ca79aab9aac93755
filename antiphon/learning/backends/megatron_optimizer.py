"""Megatron-Core's optimiser, as schedules of learning rates and checkpoints know one. Imports no megatron."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class KeptState(NamedTuple):
    """The optimiser state of a parameter on this rank."""

    state: dict[str, torch.Tensor]
    like: torch.Tensor  # the shape that it has there
    span: slice  # which of the parameter's elements these are


def kept_states(optimizer: Any, *, distributed: bool) -> Iterator[tuple[nn.Parameter, KeptState]]:
    """Yield what one of Megatron's optimisers keeps here of each parameter that it has."""
    inner = optimizer.optimizer
    if not distributed:
        for parameter in optimizer.get_parameters():
            yield parameter, KeptState(inner.state[parameter], parameter, slice(None))
        return
    for parameter, (group, order) in optimizer.model_param_group_index_map.items():
        own, span = inner.param_groups[group]["params"][order], optimizer._get_model_param_range_map(parameter)["param"]
        yield parameter, KeptState(inner.state[own], own, slice(span.start, span.end))


class ChainedOptimizer(torch.optim.Optimizer):
    """Megatron's optimisers of dense and of expert parameters, as the schedule of learning rates knows one."""

    def __init__(self, chain: Any) -> None:
        self.steps = 0  # which an update without packs does not make
        self.param_groups = chain.param_groups  # the very same: what is set here, is there
        self._chain = chain

    def step(self, closure: Any = None) -> None:
        """With the gradients that `MegatronModel.clip_gradient` has left."""
        self._chain.step_with_ready_grads()
        self.steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Those that `step` has used."""
        self._chain.zero_grad(set_to_none)
