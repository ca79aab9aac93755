"""Low-rank adapters of Megatron-Core's linear layers, of which one may be several of Hugging Face's. Imports no megatron.

The layers that peft has added to the Hugging Face model say whether adapters are enabled, and have their dropout.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from antiphon.core.errors import UnsupportedError
from antiphon.learning.backends.megatron_names import SCORE, Part
from antiphon.learning.mesh import copy_to_group, reduce_from_group
from antiphon.learning.model.lora import NAME, base_name

Rows = Callable[[torch.Tensor], torch.Tensor]


class Adapted(NamedTuple):
    """An adapted layer of Hugging Face."""

    layer: Any  # of peft
    rows: Rows  # of Megatron's weight that are its
    name: str  # of its adapter below the Megatron layer


class LinearAdapters(nn.Module):
    """The adapters of one linear layer of Megatron, which adds what they yield to what it yields.

    Ranks of `tensor` have columns of A where they have columns of the weight, and rows of B where they have rows of it.
    """

    def __init__(self, linear: nn.Module, layers: list[Adapted], scale: float, group: Any, *, by_columns: bool) -> None:
        super().__init__()
        self._layers, self._scale, self._group, self._by_columns = layers, scale, group, by_columns
        weight = linear.weight
        assert isinstance(weight, torch.Tensor)
        for adapted in layers:
            rank = adapted.layer.lora_A[NAME].weight.shape[0]
            made = nn.Module()
            made.A = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
            made.B = nn.Parameter(weight.new_empty(adapted.rows(weight).numel() // weight.shape[1], rank))
            self.add_module(adapted.name, made)
            if by_columns and group is not None:  # this rank's columns of the input, of as many on each
                adapted.layer.lora_dropout[NAME].first = group.rank() * weight.shape[1]
        linear.register_forward_hook(self._add)

    def _add(self, linear: nn.Module, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]) -> Any:
        out, bias = output
        enabled = [adapted for adapted in self._layers if not adapted.layer.disable_adapters]
        if not enabled:
            return output
        hidden = inputs[0].flatten(0, -2)  # [T, in]
        spread = out.new_zeros(out.shape[-1], len(hidden))
        for adapted in enabled:
            pair: Any = self.get_submodule(adapted.name)
            low = F.linear(adapted.layer.lora_dropout[NAME](hidden), pair.A)
            if self._group is not None:
                low = (reduce_from_group if self._by_columns else copy_to_group)(low, self._group)
            rows = adapted.rows(spread)
            rows.copy_((self._scale * F.linear(low, pair.B)).T.reshape(rows.shape))
        return out + spread.T.view_as(out), bias


def adapter_parts(parts: dict[str, Part], names: Iterable[str]) -> Iterator[tuple[str, Part]]:
    """Yield the parts of adapters by Hugging Face name, from the parts of the weights that they are added to.

    Args:
        parts: By names without adapters.
        names: All parameters of the adapted model.

    Raises:
        UnsupportedError: Megatron has no linear layer for one of them.
    """
    for name in names:
        if f".{NAME}." not in name or (part := parts.get(base_name(name))) is None:
            continue
        stem = name.partition(".lora_")[0]
        if part.stacked or part.cut is None:
            message = f"{stem} has an adapter, and no linear layer of its own in Megatron-Core; name others in targets"
            raise UnsupportedError(message, key="learner.lora.targets", value=stem)
        kind = "A" if ".lora_A." in name else "B"
        own = f"{part.names[0].removesuffix('.weight')}.adapters.{stem.rpartition('.')[2]}.{kind}"
        yield name, Part((own,), part.cut if (part.cut == 0) == (kind == "B") else None)


def add_adapters(model: nn.Module, source: nn.Module, parts: dict[str, Part], scale: float, group: Any) -> None:
    """Add adapters to the layers of Megatron's model that have some in Hugging Face's; freeze all but them and a critic's head.

    Args:
        model: Megatron's; adapters are whatever is in memory.
        source: Hugging Face's, with those of peft.
        parts: Of the weights on this rank, by names without adapters.
        scale: Factor of all adapters.
        group: The ranks of `tensor`, if these are several.
    """
    found: dict[str, list[Adapted]] = {}
    by_columns = {}
    for name, layer in source.named_modules():
        if hasattr(layer, "lora_A") and (part := parts.get(f"{name}.weight")) is not None:
            linear = part.names[0].removesuffix(".weight")
            found.setdefault(linear, []).append(Adapted(layer, part.rows, name.rpartition(".")[2]))
            by_columns[linear] = part.cut == 1
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(f".{SCORE}"))
    for linear, layers in found.items():
        own = model.get_submodule(linear)
        own.add_module("adapters", LinearAdapters(own, layers, scale, group, by_columns=by_columns[linear]))
