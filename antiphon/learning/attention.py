"""Attention over packed sequences, for any transformers model that takes its attention from the interface.

Sequences lie end to end in one row, so that linear layers see no padding. Only attention looks at sequences one by one:
those of similar length are gathered into a padded block, which is causal, so that padding on the right is never seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import AttentionInterface

from antiphon.errors import UnsupportedError
from antiphon.learning.mesh import copied, exchanged, gathered
from antiphon.types import IntArray

NAME = "antiphon_packed"


@dataclass(frozen=True, slots=True)
class _Block:
    rows: torch.Tensor  # [n, width] token of the pack in each slot; padding repeats the sequence's first token
    valid: torch.Tensor  # [tokens] flat slots whose output is used


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Where each token of a pack stands, and how its sequences are gathered for attention.

    The tokens of a shared piece are gathered into every sequence they begin, as keys, values and queries; the outputs of
    the first such sequence are used. So only attention repeats them: every other layer sees them once.
    """

    positions: torch.Tensor  # [T] in the sequence
    previous: torch.Tensor  # [T] the token before, in the sequence; of a first token, itself
    blocks: tuple[_Block, ...]
    order: torch.Tensor  # [T] where each token of the pack stands in the blocks' concatenated output
    piece: torch.Tensor  # [T] which piece it belongs to
    above: torch.Tensor  # [S, S] whether the second piece comes before the first in a sequence

    @staticmethod
    def of(lengths: IntArray, parents: IntArray, device: torch.device | str = "cpu", multiple: int = 1) -> "PackLayout":
        """The layout of a forest of pieces, see `types.Pack`; of one piece more, if the tokens are to be a multiple."""
        if (over := int(lengths.sum()) % multiple) != 0:
            lengths, parents = np.append(lengths, multiple - over), np.append(parents, -1)
        paths = sequences(lengths, parents)
        positions, previous = (np.empty(int(lengths.sum()), dtype=np.int64) for _ in range(2))
        for path in paths:
            positions[path] = np.arange(len(path))
            previous[path] = np.concatenate([path[:1], path[:-1]])
        blocks, places, placed = [], [], np.zeros(len(positions), dtype=np.bool_)
        for members in _similar(paths):
            rows = np.stack(
                [np.pad(path, (0, len(members[0]) - len(path)), constant_values=path[0]) for path in members]
            )
            valid = np.arange(rows.shape[1]) < np.array([len(path) for path in members])[:, None]
            for path, used in zip(members, valid, strict=True):
                used[: len(path)] &= ~placed[path]
                placed[path] = True
            blocks.append(_Block(torch.from_numpy(rows).to(device), torch.from_numpy(np.flatnonzero(valid)).to(device)))
            places.append(rows[valid])
        order = np.empty_like(positions)
        order[np.concatenate(places)] = np.arange(len(order))
        above = np.zeros((len(lengths), len(lengths)), dtype=np.bool_)
        for own, parent in enumerate(parents):
            if parent >= 0:
                above[own] = above[parent]
                above[own, parent] = True
        arrays = (positions, previous, order, np.repeat(np.arange(len(lengths)), lengths), above)
        at, before, order_there, piece, above_there = (torch.from_numpy(array).to(device) for array in arrays)
        return PackLayout(at, before, tuple(blocks), order_there, piece, above_there)

    def visible(self, rows: slice) -> torch.Tensor:
        """Whether the tokens of these rows see each token of the pack: those before in a sequence, and themselves. [n, T]"""
        own, token = self.piece[rows], torch.arange(len(self.piece), device=self.piece.device)
        before = (own[:, None] == self.piece) & (token[rows, None] >= token)
        return self.above[own][:, self.piece] | before


def sequences(lengths: IntArray, parents: IntArray) -> list[NDArray[np.int64]]:
    """The tokens of each sequence of a forest of pieces: from a root to a leaf, in the order of the leaves.

    >>> sequences(np.array([2, 1, 3]), np.array([-1, 0, 0]))
    [array([0, 1, 2]), array([0, 1, 3, 4, 5])]
    """
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    paths: list[NDArray[np.int64]] = []
    for start, length, parent in zip(starts, lengths, parents, strict=True):
        own = np.arange(start, start + length)
        paths.append(own if parent < 0 else np.concatenate([paths[parent], own]))
    return [paths[piece] for piece in sorted(set(range(len(lengths))) - set(parents.tolist()))]


def _similar(sequences: list[NDArray[np.int64]]) -> list[list[NDArray[np.int64]]]:
    """The sequences in blocks, longest first, whose longest is at most 1.5 times (and 16 tokens over) the shortest."""
    blocks: list[list[NDArray[np.int64]]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        if blocks and len(sequence) * 1.5 + 16 >= len(blocks[-1][0]):
            blocks[-1].append(sequence)
        else:
            blocks.append([sequence])
    return blocks


class Reader(Protocol):
    """Looks at the queries and keys of every layer that a forward passes; may raise to end it."""

    def read(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [heads, T, head size]
        key: torch.Tensor,  # [key heads, T, head size]
        scaling: float | None,
    ) -> None: ...


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, head size]
    key: torch.Tensor,  # [1, key heads, T, head size]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: PackLayout,
    scaling: float | None = None,
    reader: Reader | None = None,
    context: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence of the pack; returns [1, T, heads, head size]. `UnsupportedError` if the layer's is
    not a plain softmax over all that came before."""
    _require_plain(module, options, max(block.rows.shape[1] for block in layout.blocks))
    if reader is not None:
        reader.read(module, query[0], key[0], scaling)
    flat = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]  # [T, heads, head size]
    outputs = []
    for block in layout.blocks:
        n, width = block.rows.shape
        q, k, v = (t.index_select(0, block.rows.view(-1)).view(n, width, *t.shape[1:]).transpose(1, 2) for t in flat)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.size(1) != k.size(1))
        outputs.append(out.transpose(1, 2).reshape(n * width, *flat[0].shape[1:]).index_select(0, block.valid))
    return torch.cat(outputs).index_select(0, layout.order).unsqueeze(0), None


def attention_by_heads(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    context: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`packed_attention` where each rank of the group `context` has some tokens: they exchange them for some of the heads, of
    all tokens. Fewer key heads than ranks are repeated.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
    """
    ranks = context.size()
    if (repeats := -(-ranks // key.size(1))) > 1:
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    query, key, value = (_swap(t, context, to_tokens=False) for t in (query, key, value))
    out, _ = packed_attention(module, query, key, value, *args, **options)
    return _swap(out.transpose(1, 2), context, to_tokens=True).transpose(1, 2), None


def _swap(x: torch.Tensor, group: Any, *, to_tokens: bool) -> torch.Tensor:
    """All heads of some tokens against some heads of all, [1, heads, T, head size], or back."""
    ranks = group.size()
    split, joined = (2, 1) if to_tokens else (1, 2)
    each = [x.shape[split] // ranks] * ranks
    rows = exchanged(x[0].movedim(split - 1, 0), group, each, each)
    return torch.cat([part.movedim(0, split - 1) for part in rows.chunk(ranks)], dim=joined - 1)[None]


def attention_by_keys(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    context: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`packed_attention` where each rank of the group `context` has some tokens: it gathers the keys and values of all. For
    heads that cannot be divided among ranks."""
    layout: PackLayout = options["layout"]
    _require_plain(module, options, len(layout.positions))
    here = query.size(2)
    rows = slice(context.rank() * here, (context.rank() + 1) * here)
    keys, values = (
        copied(gathered(t[0].transpose(0, 1), context), context).transpose(0, 1)[None] for t in (key, value)
    )
    out = F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=layout.visible(rows),
        scale=options.get("scaling"),
        enable_gqa=query.size(1) != key.size(1),
    )
    return out.transpose(1, 2), None


def _require_plain(module: torch.nn.Module, options: Mapping[str, Any], longest: int) -> None:
    """What transformers' models say of attention that is another, and would otherwise be passed over."""
    found = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    window = options.get("sliding_window")
    if window is not None and longest > window:
        found.append(f"a sliding window of {window}, and there is a sequence of {longest} tokens")
    if found:
        layer = getattr(module, "layer_idx", "?")
        raise UnsupportedError(f"{type(module).__name__} of layer {layer} has {', '.join(found)}: not supported")


CONTEXT_ATTENTION = {"heads": "antiphon_packed_heads", "keys": "antiphon_packed_keys"}  # by `mesh.context_attention`

AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(CONTEXT_ATTENTION["heads"], attention_by_heads)
AttentionInterface.register(CONTEXT_ATTENTION["keys"], attention_by_keys)
