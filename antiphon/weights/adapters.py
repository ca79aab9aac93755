"""Weights as low-rank adapters to a base model that all ends have on disk: the adapters travel, and weights trained whole."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open

from antiphon.core.errors import WeightsError
from antiphon.weights.checkpoint_files import list_weight_files
from antiphon.weights.manifest import Adapters

T = TypeVar("T")

A, B = "/lora_A", "/lora_B"  # suffixes of the name of a weight for the two factors of its adapter


def merge_adapter(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return `weight + scale * b @ a`, in float32 at least.

    Args:
        weight: [out, in].
        a: [rank, in].
        b: [out, rank].
        scale: Factor of the product.
    """
    precise = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(precise), b.to(precise), a.to(precise), alpha=scale)


def flatten_adapters(pairs: dict[str, tuple[T, T]]) -> Iterator[tuple[str, T]]:
    """Yield both factors of each adapter by name; `pairs` has (a, b) by the name of the weight."""
    for name, (a, b) in pairs.items():
        yield name + A, a
        yield name + B, b


def apply_adapters(
    tensors: Iterable[tuple[str, torch.Tensor]], adapters: Adapters | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of the base by name, with adapters merged; without adapters yield `tensors` as they are.

    Args:
        tensors: Adapter factors named as by `flatten_adapters`, and whole weights in place of the base's.
        adapters: The base and the scale; None if `tensors` are all weights.

    Raises:
        WeightsError: If a tensor belongs to a weight that the base does not have.
    """
    if adapters is None:
        yield from tensors
        return
    parts = dict(tensors)
    for file in list_weight_files(Path(adapters.base)):
        with safe_open(file, "pt") as base:
            for name in base.keys():  # noqa: SIM118 - it is no mapping
                weight = parts.pop(name) if name in parts else base.get_tensor(name)
                if name + A in parts:
                    a, b = parts.pop(name + A), parts.pop(name + B)
                    weight = merge_adapter(weight.to(a.device), a, b, adapters.scale)
                yield name, weight
    if parts:
        name = min(parts).partition("/")[0]
        raise WeightsError(
            f"{adapters.base} has no weight {name!r}, but an adapter or a value for it came", tensor=name
        )
