"""Attention over packed sequences, for any transformers model that takes its attention from the interface.

Sequences lie end to end in one row, so that linear layers see no padding. Only attention looks at sequences one by one:
those of similar length are gathered into a padded block, which is causal, so that padding on the right is never seen. What
follows a shared prompt that is longer than itself is not gathered with it: its tokens look at both through a mask.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from antiphon.core.errors import UnsupportedError
from antiphon.learning.mesh import all_to_all_rows, copy_to_group, gather_from_group
from antiphon.learning.model.pack_layout import PackLayout

PACKED_ATTENTION = "antiphon_packed"


class AttentionReader(Protocol):
    """Reads queries and keys of every layer that a forward passes; may raise to end it."""

    def read(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [heads, n, head size]: of all tokens, or of those that this rank computes
        key: torch.Tensor,  # [key heads, T, head size]
        scaling: float | None,
        begin: int = 0,
    ) -> None:
        """Read the queries and keys of one attention layer. `begin` is the place of the first query in the pack."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, head size]
    key: torch.Tensor,  # [1, key heads, T, head size]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: PackLayout,
    scaling: float | None = None,
    reader: AttentionReader | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence of the pack; returns [1, T, heads, head size].

    Raises:
        UnsupportedError: The attention is not a plain softmax over all earlier tokens.
    """
    _require_plain(module, attention_mask, options, layout.longest)
    if reader is not None:
        reader.read(module, query[0], key[0], scaling)
    flat = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]  # [T, heads, head size]
    outputs = []
    for block in layout.blocks:
        rows = (block.rows, *[block.rows if block.keys is None else block.keys] * 2)
        q, k, v = (
            t.index_select(0, of.view(-1)).view(*of.shape, *t.shape[1:]).transpose(1, 2)
            for t, of in zip(flat, rows, strict=True)
        )
        out = _attend(q, k, v, block.mask, scaling)
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, block.valid))
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
    """Run `packed_attention` where each rank of the group `context` has some tokens of every sequence.

    Ranks exchange their tokens for some of the heads, of all tokens. Key heads are repeated if there are fewer than ranks.

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
    rows = all_to_all_rows(x[0].movedim(split - 1, 0), group, each, each)
    return torch.cat([part.movedim(0, split - 1) for part in rows.chunk(ranks)], dim=joined - 1)[None]


def attention_by_keys(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    context: Any,
    reader: AttentionReader | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`packed_attention` where each rank of the group `context` has some tokens: it gathers the keys and values of all.

    For heads that cannot be divided among ranks.
    """
    layout: PackLayout = options["layout"]
    _require_plain(module, attention_mask, options, layout.longest)
    here = query.size(2)
    rows = slice(context.rank() * here, (context.rank() + 1) * here)
    keys, values = (
        copy_to_group(gather_from_group(t[0].transpose(0, 1), context), context).transpose(0, 1)[None]
        for t in (key, value)
    )
    if reader is not None:
        reader.read(module, query[0], keys[0], options.get("scaling"), rows.start)
    out = _attend(query, keys, values, layout.visible(rows), options.get("scaling"))
    return out.transpose(1, 2), None


def _attend(
    query: torch.Tensor,  # [n, heads, tokens, head size]
    key: torch.Tensor,  # [n, key heads, tokens, head size]
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attend to what the mask shows, or causally without a mask; returns [n, heads, tokens, head size]."""
    heads = query.size(1) // key.size(1)  # that share keys
    if heads > 1 and query.is_cuda and (mask is not None or value.dtype == torch.float32):
        # There flash attention alone knows of shared keys, and neither of masks nor of single precision: what torch would
        # fall back to keeps whole maps.
        key, value = (t.repeat_interleave(heads, dim=1) for t in (key, value))
        heads = 1
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=heads > 1
    )


def _require_plain(
    module: torch.nn.Module, mask: torch.Tensor | None, options: Mapping[str, Any], longest: int
) -> None:
    """Raise `UnsupportedError` for attention that is not a plain softmax."""
    found = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    if mask is not None:  # transformers makes none for a function of ours
        found.append("a mask of its own")
    window = options.get("sliding_window")
    if window is not None and longest > window:
        found.append(f"a sliding window of {window}, and there is a sequence of {longest} tokens")
    if found:
        layer = getattr(module, "layer_idx", "?")
        raise UnsupportedError(f"{type(module).__name__} of layer {layer} has {', '.join(found)}: not supported")


CONTEXT_ATTENTION = {"heads": "antiphon_packed_heads", "keys": "antiphon_packed_keys"}  # by `mesh.context_attention`

AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(CONTEXT_ATTENTION["heads"], attention_by_heads)
AttentionInterface.register(CONTEXT_ATTENTION["keys"], attention_by_keys)
