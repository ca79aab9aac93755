"""Attention over packs in Megatron-Core's layers. Imports no megatron."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from antiphon.learning.model.attention import AttentionReader
from antiphon.learning.model.pack_layout import PackLayout


class AttentionInputs(NamedTuple):
    """The facts that attention needs to know of a pack."""

    kind: str  # of attention
    layout: PackLayout
    reader: AttentionReader | None
    context: Any  # the ranks that have the other tokens, if not all are here
    windows: Sequence[int | None]  # tokens that each layer of the model looks back


class PackedAttention(nn.Module):
    """Megatron's core attention, over the sequences of a pack."""

    def __init__(self, config: Any, layer_number: int, **others: Any) -> None:
        super().__init__()
        self.layer_idx = layer_number - 1

    def forward(
        self,
        query: torch.Tensor,  # [T, 1, heads, head size]
        key: torch.Tensor,  # [T, 1, key heads, head size]
        value: torch.Tensor,
        attention_mask: None,
        attention_bias: AttentionInputs,
        **others: Any,
    ) -> torch.Tensor:
        """[T, 1, heads x head size]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        kind, layout, reader, context, windows = attention_bias
        options = {"layout": layout, "reader": reader, "context": context, "sliding_window": windows[self.layer_idx]}
        out, _ = ALL_ATTENTION_FUNCTIONS[kind](self, query, key, value, None, **options)
        return out[0].flatten(1)[:, None]
