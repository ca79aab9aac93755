"""Transfers between host and device.

The host queues work for the GPU and lets it go idle when it waits for results: so sends do not wait, and results come back
together.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LARGE = 1 << 16  # bytes of an activation that is worth a copy


def to_device(array: NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """Copy an array to a device without waiting."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()  # from other memory it is copied once all that was asked for before is done
    return tensor.to(device, non_blocking=True)


def save_on_host() -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which large activations on a GPU are kept in pinned host memory until the backward pass.

    Copies are queued on the stream that computes, so they are ordered with it and nobody waits for them.
    """

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor] | torch.Tensor:
        is_activation = tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter)
        if not (tensor.is_cuda and is_activation and tensor.nbytes >= LARGE):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return tensor.device, host

    def unpack(packed: tuple[torch.device, torch.Tensor] | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def sum_measures(loss: torch.Tensor, measures: Mapping[str, torch.Tensor], tokens: int) -> dict[str, torch.Tensor]:
    """Return sums over a pack, as scalars on their device: of each measure [n], of its `loss`, and the number of `tokens`."""
    sums = {name: values.detach().sum().double() for name, values in measures.items()}
    return sums | {"loss": loss.detach().double(), "tokens": torch.full_like(loss, tokens, dtype=torch.float64)}


def to_floats(scalars: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the values of scalars that are on one device, in one transfer."""
    return dict(zip(scalars, torch.stack([*scalars.values()]).tolist(), strict=True)) if scalars else {}


def mean_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of metrics over updates.

    A metric that an update has once, such as its loss, is averaged over the updates that have it; one that is a mean over its
    tokens is averaged over all tokens. Metrics over no tokens are left out.
    """
    found = {}
    for name in dict.fromkeys(name for update in updates for name in update if name not in ("tokens", "lr")):
        said = [(_weight(name, update), update[name]) for update in updates if name in update]
        if total := sum(weight for weight, _ in said):
            found[name] = sum(weight * value for weight, value in said) / total
    return found


def _weight(name: str, update: Mapping[str, float]) -> float:
    """Return the weight of an update's metric in a mean over updates."""
    match name:
        case "loss" | "grad_norm" | "expert_balance":
            return 1
        case "mixed_mismatch_kl":
            return update["tokens"] * update["mixed_share"]
    return update["tokens"]
