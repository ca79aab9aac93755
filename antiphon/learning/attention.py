"""Attention over packed sequences, for any transformers model that takes its attention from the interface.

Sequences lie end to end in one row, so that linear layers see no padding. Only attention looks at sequences one by one:
those of similar length are gathered into a padded block, which is causal, so that padding on the right is never seen.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from antiphon.types import IntArray

NAME = "antiphon_packed"


@dataclass(frozen=True, slots=True)
class _Block:
    rows: torch.Tensor  # [n, width] position in the pack of each slot; padding repeats the sequence's first token
    valid: torch.Tensor  # [tokens] flat slots that hold a token


@dataclass(frozen=True, slots=True)
class PackLayout:
    """How the sequences of a pack are gathered for attention."""

    blocks: tuple[_Block, ...]
    order: torch.Tensor  # [T] where each token of the pack stands in the blocks' concatenated output

    @staticmethod
    def of(lengths: IntArray, device: torch.device | str = "cpu") -> "PackLayout":
        """The layout of a pack of sequences of these lengths [S], in this order."""
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        blocks, places = [], []
        for members in _similar(lengths):
            width = int(lengths[members].max())
            offsets = np.arange(width)[None, :]
            inside = offsets < lengths[members][:, None]
            rows = starts[members][:, None] + np.where(inside, offsets, 0)
            blocks.append(_Block(torch.from_numpy(rows).to(device), torch.from_numpy(np.flatnonzero(inside)).to(device)))
            places.append(rows[inside])
        order = np.empty(int(lengths.sum()), dtype=np.int64)
        order[np.concatenate(places)] = np.arange(len(order))
        return PackLayout(tuple(blocks), torch.from_numpy(order).to(device))


def _similar(lengths: IntArray) -> list[IntArray]:
    """Indices of sequences, in blocks whose longest is less than 1.5 times (and 16 tokens over) their shortest."""
    descending = np.argsort(-lengths, kind="stable")
    blocks, start = [], 0
    for position in range(1, len(descending) + 1):
        longest = lengths[descending[start]]
        if position == len(descending) or lengths[descending[position]] * 1.5 + 16 < longest:
            blocks.append(descending[start:position])
            start = position
    return blocks


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, head size]
    key: torch.Tensor,  # [1, key heads, T, head size]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: PackLayout,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence of the pack; returns [1, T, heads, head size]."""
    flat = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]  # [T, heads, head size]
    outputs = []
    for block in layout.blocks:
        n, width = block.rows.shape
        q, k, v = (
            t.index_select(0, block.rows.view(-1)).view(n, width, *t.shape[1:]).transpose(1, 2) for t in flat
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.size(1) != k.size(1))
        outputs.append(out.transpose(1, 2).reshape(n * width, *flat[0].shape[1:]).index_select(0, block.valid))
    return torch.cat(outputs).index_select(0, layout.order).unsqueeze(0), None


AttentionInterface.register(NAME, packed_attention)
