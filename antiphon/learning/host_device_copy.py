"""To a device and back. A GPU is behind the process that tells it what to do, and idle after that process has waited for it:
what is sent does not wait, and what comes back comes all at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """An array on a device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()  # from other memory it is copied once all that was asked for before is done
    return tensor.to(device, non_blocking=True)


def sum_measures(loss: torch.Tensor, measures: Mapping[str, torch.Tensor], tokens: int) -> dict[str, torch.Tensor]:
    """The sum of each measure of a pack, its `loss`, and of how many `tokens` all that is: scalars, still on their device."""
    sums = {name: values.detach().sum().double() for name, values in measures.items()}
    return sums | {"loss": loss.detach().double(), "tokens": torch.full_like(loss, tokens, dtype=torch.float64)}


def to_floats(scalars: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """What scalars are that are on one device."""
    return dict(zip(scalars, torch.stack([*scalars.values()]).tolist(), strict=True)) if scalars else {}


def mean_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of what updates say. What an update says once, as its loss, is averaged over those that do; what it says
    on average of its `tokens`, over the tokens of all. What is said of none is left out."""
    found = {}
    for name in dict.fromkeys(name for update in updates for name in update if name not in ("tokens", "lr")):
        said = [(_weight(name, update), update[name]) for update in updates if name in update]
        if total := sum(weight for weight, _ in said):
            found[name] = sum(weight * value for weight, value in said) / total
    return found


def _weight(name: str, update: Mapping[str, float]) -> float:
    """How much an update's metric counts beside those of others."""
    match name:
        case "loss" | "grad_norm" | "expert_balance":
            return 1
        case "mixed_mismatch_kl":
            return update["tokens"] * update["mixed_share"]
    return update["tokens"]
