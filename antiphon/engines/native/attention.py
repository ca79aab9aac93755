"""Attention of a flat batch against the slots' KV cache.

One engine step runs the model on all its tokens laid end to end, [1, T], decode rows first and prefill chunks after.
The linear layers see no padding; only attention must know where a sequence begins. Transformers lets a model call an
attention function registered under a name of ours, and hands it whatever keyword arguments the forward was given: the
step's `FlatBatch` travels that way. For a name that has no mask function registered, transformers builds no mask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from antiphon.core.errors import UnsupportedError

ATTENTION_NAME = "antiphon_slots"
Indices = NDArray[np.int64]

# What calling attention once more costs, in bytes of KV cache that could be read meanwhile. It decides which slots share
# a call and read padding for it. About 25 us on one CPU core, 10 us on an accelerator.
_CALL_BYTES = {"cpu": 150_000, "cuda": 20_000_000}


class KVCache:
    """Keys and values of every slot, one tensor [2, slots, kv_heads, capacity, head_dim] a layer.

    Layers appear when they first write, shaped like what they write, so nothing is asked of the model's configuration.
    The capacity doubles as sequences grow, up to what is asked by `reserve`.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.capacity = 0
        self._layers: dict[int, Tensor] = {}

    def reserve(self, tokens: int, limit: int) -> None:
        """Make room for `tokens` a slot, by doubling but to no more than `limit`."""
        if tokens <= self.capacity:
            return
        self.capacity = min(max(tokens, 2 * self.capacity, 128), max(tokens, limit))
        for index, old in list(self._layers.items()):
            new = self._empty(old.shape[2], old.shape[4], old)
            new[..., : old.shape[3], :] = old
            self._layers[index] = new

    def layer(self, index: int, like: Tensor) -> Tensor:
        """Return the cache of a layer whose keys are `like` [1, kv_heads, T, head_dim]."""
        found = self._layers.get(index)
        if found is None:
            found = self._layers[index] = self._empty(like.shape[1], like.shape[3], like)
        return found

    def copy(self, source: int, targets: Sequence[int], tokens: int) -> None:
        """Copy the first `tokens` positions of slot `source` to the slots `targets`."""
        for layer in self._layers.values():
            prefix = layer[:, source, :, :tokens]
            for target in targets:
                layer[:, target, :, :tokens].copy_(prefix)

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Set all keys and values of a slot to zero."""
        for layer in self._layers.values():
            layer[:, slot].zero_()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one layer's keys and values of one token; 0 before the first step."""
        layer = next(iter(self._layers.values()), None)
        return 0 if layer is None else 2 * layer.shape[2] * layer.shape[4] * layer.element_size()

    def _empty(self, heads: int, head_dim: int, like: Tensor) -> Tensor:
        shape = (2, self.slots, heads, self.capacity, head_dim)
        if like.device.type != "cpu":
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        # Masked positions are multiplied by zero, so they must never hold a NaN. numpy's zeros come from calloc: unlike
        # torch.zeros it touches no page before it is written.
        count = int(np.prod(shape)) * like.element_size()
        return torch.from_numpy(np.zeros(count, np.uint8)).view(like.dtype).view(shape)


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """Decode rows [begin, end) of the flat batch that share one attention call, against a range of slots.

    Slots of the range that do not decode attend too, with the query of some row; their output is dropped.
    """

    begin: int
    end: int
    slots: slice
    length: int  # longest of them, keys and values of this step included
    mask: Tensor | None  # [slots, 1, 1, length], additive; None if all are equally long
    spread: Tensor | None  # [slots] row of each slot; None if every slot of the range decodes
    gather: Tensor | None  # [end - begin] where in the range each row is


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A piece of one sequence, rows [begin, end) of the flat batch."""

    begin: int
    end: int
    slot: int
    length: int  # of the sequence up to the end of this piece
    mask: Tensor | None  # [1, 1, end - begin, length]; None if the piece is the whole sequence


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """One step's tokens: where they go in the cache and what they attend to."""

    cache: KVCache
    slots: Tensor  # [T]
    positions: Tensor  # [T]
    rows: tuple[DecodeSpan, ...]
    chunks: tuple[PrefillChunk, ...]
    longest: int


def make_flat_batch(
    cache: KVCache, decode: tuple[Indices, Indices], chunks: list[tuple[int, int, int]], like: Tensor
) -> tuple[FlatBatch, Indices, Indices]:
    """Lay the tokens of one step end to end.

    Args:
        cache: The KV cache they attend to.
        decode: Slots [N], ascending, of which the last token is computed, and the lengths [N] of their sequences.
        chunks: Pieces to prefill: slot, start, stop.
        like: A tensor with the model's device and dtype.

    Returns:
        The batch, and the slot and position of each token [T] on the host.
    """
    slots, lengths = decode
    flat_slots = np.concatenate([slots, *(np.full(stop - start, slot) for slot, start, stop in chunks)])
    positions = np.concatenate([lengths - 1, *(np.arange(start, stop) for _, start, stop in chunks)])
    placed = torch.from_numpy(np.stack([flat_slots, positions])).to(like.device, non_blocking=True)
    pieces, begin = [], len(slots)
    for slot, start, stop in chunks:
        pieces.append(PrefillChunk(begin, begin + stop - start, slot, stop, _causal_mask(start, stop, like)))
        begin += stop - start
    longest = int(positions.max()) + 1
    batch = FlatBatch(cache, placed[0], placed[1], _make_spans(cache, slots, lengths, like), tuple(pieces), longest)
    return batch, flat_slots, positions


def _causal_mask(start: int, stop: int, like: Tensor) -> Tensor | None:
    if start == 0:
        return None
    query = torch.arange(start, stop, device=like.device)[:, None]
    return _additive_mask(torch.arange(stop, device=like.device) <= query, like)[None, None]


def _additive_mask(visible: Tensor, like: Tensor) -> Tensor:
    # Every layer would turn a boolean mask into this one again.
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, float("-inf"))


def _make_spans(cache: KVCache, slots: Indices, lengths: Indices, like: Tensor) -> tuple[DecodeSpan, ...]:
    call = _CALL_BYTES.get(like.device.type, _CALL_BYTES["cuda"]) // max(cache.bytes_per_token, 1)
    return tuple(
        _make_span(*span, slots, lengths, like) for span in _group_rows(slots.tolist(), lengths.tolist(), call)
    )


def _make_span(begin: int, end: int, slots: Indices, lengths: Indices, like: Tensor) -> DecodeSpan:
    own = slots[begin:end] - slots[begin]
    size, longest = int(own[-1]) + 1, int(lengths[begin:end].max())
    span = slice(int(slots[begin]), int(slots[begin]) + size)
    spread = gather = None
    visible = lengths[begin:end]
    if size > end - begin:
        rows = np.zeros(size, np.int64)
        rows[own] = np.arange(end - begin)
        visible = visible[rows]
        spread, gather = torch.from_numpy(np.stack([rows + begin, np.resize(own, size)])).to(like.device).unbind(0)
        gather = gather[: end - begin]
    mask = None
    if longest > int(visible.min()):
        seen = torch.from_numpy(np.arange(longest) < visible[:, None]).to(like.device, non_blocking=True)
        mask = _additive_mask(seen, like)[:, None, None]
    return DecodeSpan(begin, end, span, longest, mask, spread, gather)


def _group_rows(slots: list[int], lengths: list[int], call: int) -> list[tuple[int, int]]:
    """Group decode rows into spans, each of one attention call; returns [begin, end) of each.

    Greedy: a row joins the span before it unless what is then read in vain (slots between them, and padding to the longest)
    costs more than another `call`. Costs are in tokens read.
    """
    if not slots:
        return []
    spans, begin, longest = [], 0, lengths[0]
    for i in range(1, len(slots)):
        joined = max(longest, lengths[i])
        held = (slots[i - 1] - slots[begin] + 1) * longest
        if (slots[i] - slots[begin] + 1) * joined - held - lengths[i] <= call:
            longest = joined
            continue
        spans.append((begin, i))
        begin, longest = i, lengths[i]
    return [*spans, (begin, len(slots))]


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    slot_batch: FlatBatch,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend against the slots' KV cache; transformers calls this in each layer.

    Writes keys and values into the cache, then attends: decode rows of many slots at once, each chunk to its own slot.

    Args:
        module: The attention layer.
        query: [1, heads, T, head_dim].
        key: [1, kv_heads, T, head_dim].
        value: [1, kv_heads, T, head_dim].
        attention_mask: None: transformers builds none for this function.
        scaling: Factor of the attention scores; None is 1 / sqrt(head_dim).
        slot_batch: Where the tokens are in the cache.
        **options: The layer's other options, of which none may change the softmax.

    Returns:
        Outputs [1, T, heads, head_dim], and None in place of attention weights.

    Raises:
        UnsupportedError: The layer has soft-capped scores, sinks, a sliding window shorter than a sequence, a mask of its own,
            or values of another size than its keys.
    """
    _check_plain_softmax(module, options, slot_batch.longest)
    if attention_mask is not None:
        raise UnsupportedError(
            f"the native engine cannot apply the mask that layer {module.layer_idx} makes of its own"
        )
    if value.shape[-1] != key.shape[-1]:
        raise UnsupportedError(
            f"the native engine keeps values of the size of their keys: layer {module.layer_idx} has keys of "
            f"{key.shape[-1]} and values of {value.shape[-1]} numbers a head"
        )
    kv = slot_batch.cache.layer(module.layer_idx, key)
    _write_cache(kv, key, value, slot_batch)
    # [T, heads, head_dim]; contiguous, since fused kernels want a dense head_dim and `linear` may have turned it.
    tokens = query[0].transpose(0, 1).contiguous()
    parts = [_attend_span(rows, tokens, kv, scaling) for rows in slot_batch.rows]
    parts += [_attend_chunk(chunk, tokens, kv, scaling) for chunk in slot_batch.chunks]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _check_plain_softmax(module: Any, options: Mapping[str, Any], longest: int) -> None:
    softcap, sinks, window = (options.get(name) for name in ("softcap", "s_aux", "sliding_window"))
    if softcap is not None or sinks is not None or (window is not None and window < longest):
        raise UnsupportedError(
            f"the native engine has neither soft-capped attention, nor sinks, nor sliding windows: layer "
            f"{module.layer_idx} wants softcap={softcap}, sinks={sinks is not None}, sliding_window={window} "
            f"for a sequence of {longest} tokens"
        )


def _write_cache(kv: Tensor, key: Tensor, value: Tensor, batch: FlatBatch) -> None:
    keys, values = kv.unbind(0)
    keys[batch.slots, :, batch.positions] = key[0].transpose(0, 1)
    values[batch.slots, :, batch.positions] = value[0].transpose(0, 1)


def _attend_span(rows: DecodeSpan, tokens: Tensor, kv: Tensor, scaling: float | None) -> Tensor:
    keys, values = kv[:, rows.slots, :, : rows.length].unbind(0)
    own = tokens[rows.begin : rows.end] if rows.spread is None else tokens[rows.spread]
    count, heads, head_dim = own.shape
    # A query group of g heads reads the same keys: as g query rows of one head nothing is repeated in memory.
    grouped = own.reshape(count, kv.shape[2], heads // kv.shape[2], head_dim)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=rows.mask, scale=scaling)
    out = out.reshape(count, heads, head_dim)
    return out if rows.gather is None else out[rows.gather]


def _attend_chunk(chunk: PrefillChunk, tokens: Tensor, kv: Tensor, scaling: float | None) -> Tensor:
    keys, values = kv[:, chunk.slot : chunk.slot + 1, :, : chunk.length].unbind(0)
    query = tokens[chunk.begin : chunk.end].transpose(0, 1)[None]
    out = scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scaling,
        enable_gqa=keys.shape[1] != query.shape[1],
    )
    return out[0].transpose(0, 1)


AttentionInterface.register(ATTENTION_NAME, slot_attention)
