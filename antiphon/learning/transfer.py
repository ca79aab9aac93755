"""To a device and back. A GPU is behind the process that tells it what to do, and idle after that process has waited for it:
what is sent does not wait, and what comes back comes all at once."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def sent(array: NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """An array on a device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()  # from other memory it is copied once all that was asked for before is done
    return tensor.to(device, non_blocking=True)


def sums_of(loss: torch.Tensor, measures: Mapping[str, torch.Tensor], tokens: int) -> dict[str, torch.Tensor]:
    """The sum of each measure of a pack, its `loss`, and of how many `tokens` all that is: scalars, still on their device."""
    sums = {name: values.detach().sum().double() for name, values in measures.items()}
    return sums | {"loss": loss.detach().double(), "tokens": torch.full_like(loss, tokens, dtype=torch.float64)}


def numbers(scalars: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """What scalars are that are on one device."""
    return dict(zip(scalars, torch.stack([*scalars.values()]).tolist(), strict=True)) if scalars else {}
