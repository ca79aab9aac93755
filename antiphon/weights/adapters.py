"""Weights as a base that all ends have on disk and low-rank adapters to it: only these travel."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open

from antiphon.core.errors import WeightsError
from antiphon.weights.base import Adapters, weight_files

T = TypeVar("T")

A, B = "/lora_A", "/lora_B"  # what follows a weight's name on the way


def with_adapter(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """weight [out, in] + scale · b [out, rank] a [rank, in], in float32 at least."""
    precise = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(precise), b.to(precise), a.to(precise), alpha=scale)


def flat(pairs: dict[str, tuple[T, T]]) -> Iterator[tuple[str, T]]:
    """Adapters by name of their weight, one tensor after another."""
    for name, (a, b) in pairs.items():
        yield name + A, a
        yield name + B, b


def applied(
    tensors: Iterable[tuple[str, torch.Tensor]], adapters: Adapters | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights of the base, those with an adapter (as `flat` names them) changed by it; without adapters the tensors are
    these weights themselves. `WeightsError` if one is of a weight that the base does not have."""
    if adapters is None:
        yield from tensors
        return
    parts = dict(tensors)
    for file in weight_files(Path(adapters.base)):
        with safe_open(file, "pt") as base:
            for name in base.keys():  # noqa: SIM118 - it is no mapping
                weight = base.get_tensor(name)
                if name + A in parts:
                    a, b = parts.pop(name + A), parts.pop(name + B)
                    weight = with_adapter(weight.to(a.device), a, b, adapters.scale)
                yield name, weight
    if parts:
        raise WeightsError(f"{adapters.base} lacks {min(parts).rpartition('/')[0]!r}, which an adapter came for")
