"""The rhythm of attention, read while the model runs. No map of attention is ever whole: what is kept is linear in length.

Let A be a head's causal map over one sequence, its rows the queries of input tokens, and R the sequence's loss tokens:

    span    d = mean over t in R of sum_s A[t, s] (t - s)
    WAAD_t    = sum_s A[t, s] min(t - s, W)                        mean over the heads of small span
    FAI_s     = mean over t in R, s + low <= t <= s + high, of A[t, s]           those of large span

with indices that count the sequence's tokens, those between the turns of a conversation too. Row t is that of token t itself,
once it has been read; not the row before, that it was sampled from. A token that no other is far enough behind has FAI 0.

Spans, and so the choice of heads among all those of the layers read, are each sequence's own: what is read of a sequence does
not depend on its pack. A head may be local in one sequence and not in another.

Source: Li et al. 2025, "Attention illuminates LLM reasoning", arXiv 2510.13554, second version.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from antiphon.algorithms.sections import RhythmConfig
from antiphon.core.errors import UnsupportedError
from antiphon.core.types import FloatArray, Pack
from antiphon.learning.host_device_copy import to_device
from antiphon.learning.mesh import Mesh
from antiphon.learning.model.pack_layout import loss_sequences

LAYERS = 5
HEAD_SHARE = 0.3  # that are local, and that are global
BLOCK = 2**21  # elements of the maps that exist at once, unless one row of all heads has more


class AllLayersRead(Exception):  # noqa: N818 - control flow, as StopIteration
    """Ends a forward pass when the last layer that is needed has been read."""


def middle_layers(count: int) -> list[int]:
    """Five evenly spaced layers, numbered from 0, from ⌊count / 3⌋ to ⌊2 count / 3⌋.

    Where fewer lie there it is these; there is always one.

    >>> middle_layers(36), middle_layers(30), middle_layers(6), middle_layers(4), middle_layers(2), middle_layers(1)
    ([12, 15, 18, 21, 24], [10, 12, 15, 18, 20], [2, 3, 4], [1, 2], [0, 1], [0])
    """
    first, last = count // 3, 2 * count // 3
    return sorted({round(float(layer)) for layer in np.linspace(first, last, LAYERS)})


class HeadSums(NamedTuple):
    """Sums over the attention maps of H heads over one sequence; those over some rows each add up to those over all."""

    spans: torch.Tensor  # [H] in tokens
    waad: torch.Tensor  # [H, R] in tokens
    fai: torch.Tensor  # [H, R]

    def plus(self, other: "HeadSums") -> "HeadSums":
        """Return the sums over the rows of both."""
        return HeadSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def head_sums(
    query: torch.Tensor,  # [H, n, head size], of the rows `here`
    key: torch.Tensor,  # [key heads, L, head size]
    rows: NDArray[np.int64],  # [R] place in the sequence of each query, ascending; not empty
    scaling: float,
    config: RhythmConfig,
    here: NDArray[np.int64] | None = None,  # [n] which of the rows the queries are of, ascending; all by default
) -> HeadSums:
    """Return the sums over softmax(query key' · scaling), computed in blocks of rows. WAAD of other rows is 0."""
    heads, count, length = query.size(0), len(rows), key.size(1)
    own = np.arange(count) if here is None else here
    grouped = query.mul(scaling).unflatten(0, (key.size(0), -1))  # heads that share keys lie together
    spans, waad = query.new_zeros(heads), query.new_zeros(heads, count)
    columns = query.new_zeros(heads, length)
    places, counts = (to_device(array, query.device) for array in (rows, count_later_queries(rows, config)))
    at_once = max(1, BLOCK // (heads * length))
    for begin in range(0, len(own), at_once):
        some = own[begin : begin + at_once]
        block = to_device(some, query.device)
        first, last = int(rows[some[0]]), int(rows[some[-1]])
        distance = (places[block, None] - torch.arange(last + 1, device=query.device)).to(query.dtype)
        ahead = torch.zeros_like(distance).masked_fill_(distance < 0, -torch.inf)
        scores = grouped[:, :, begin : begin + at_once].flatten(1, 2) @ key[:, : last + 1].mT
        maps = scores.view(heads, -1, last + 1).add_(ahead).softmax(-1)  # [H, rows of the block, last + 1]
        weights = torch.stack([distance, distance.clamp(max=config.window)])
        far, waad[:, block] = torch.einsum("hts,kts->kht", maps, weights)
        spans += far.sum(-1)
        seen = slice(max(first - config.horizon_high, 0), max(last - config.horizon_low + 1, 0))
        behind = (distance >= config.horizon_low) & (distance <= config.horizon_high)
        columns[:, seen] += (maps[:, :, seen] * behind[:, seen]).sum(1)
    return HeadSums(spans / count, waad, columns[:, places] / counts)


def count_later_queries(rows: NDArray[np.int64], config: RhythmConfig) -> FloatArray:
    """Return how many of the rows [R] are far enough behind each row to count for its FAI, [R]; 1 where there is none.

    >>> count_later_queries(np.array([0, 1, 2, 9]), RhythmConfig(horizon_low=1, horizon_high=8))
    array([2., 2., 1., 1.], dtype=float32)
    """
    until = np.searchsorted(rows, rows + config.horizon_high, side="right")
    return (until - np.searchsorted(rows, rows + config.horizon_low)).clip(1).astype(np.float32)


def waad_and_fai(sums: HeadSums) -> torch.Tensor:
    """Return WAAD over the heads of the smallest spans and FAI over those of the largest, [R, 2]."""
    order = sums.spans.argsort(stable=True)
    count = max(1, round(HEAD_SHARE * len(order)))
    return torch.stack([sums.waad[order[:count]].mean(0), sums.fai[order[-count:]].mean(0)], -1)


@dataclass(frozen=True, slots=True)
class _Sequence:
    tokens: torch.Tensor  # [L] its places in the pack
    rows: NDArray[np.int64]  # [R] where its loss tokens are, in the sequence
    places: NDArray[np.int64]  # [R] and in the pack
    found: dict[tuple[int, ...], HeadSums] = field(default_factory=dict)  # by layer, and which of its heads


class AttentionStatsReader:
    """Computes WAAD and FAI of one pack from the given layers, as the `reader` of a forward with packed attention.

    After the last of these layers it ends the forward with `AllLayersRead`. With a mesh the forward goes on to its end, because
    the ranks gather sharded parameters together; each has read some heads, rows or layers, and they exchange what they read.
    """

    def __init__(
        self, pack: Pack, layers: Sequence[int], config: RhythmConfig, device: torch.device, mesh: Mesh | None = None
    ) -> None:
        self._left = set(layers)
        self._mesh = mesh
        self._config = config
        self._length = len(pack.tokens)
        self._sequences = [_Sequence(to_device(path, device), rows, path[rows]) for path, rows in loss_sequences(pack)]

    def read(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [heads, n, head size]
        key: torch.Tensor,  # [key heads, T, head size]
        scaling: float | None,
        begin: int = 0,
    ) -> None:
        """See `attention.AttentionReader`. In float32 at least, whatever the model runs in."""
        layer: Any = getattr(module, "layer_idx", None)
        if layer not in self._left:
            return
        with torch.autocast(query.device.type, enabled=False):
            precise = torch.promote_types(query.dtype, torch.float32)
            scale = query.size(-1) ** -0.5 if scaling is None else scaling
            for sequence in self._sequences:
                places = sequence.places - begin
                here = np.flatnonzero((places >= 0) & (places < query.size(1)))
                queries = query[:, to_device(places[here], query.device)].to(precise)
                keys = key[:, sequence.tokens].to(precise)
                sequence.found[layer, *self._heads] = head_sums(queries, keys, sequence.rows, scale, self._config, here)
        self._left.remove(layer)
        if self._mesh is None and not self._left:
            raise AllLayersRead

    @property
    def _heads(self) -> tuple[int, ...]:
        """This rank's heads of a layer, as coordinates that sort like the heads."""
        if self._mesh is None:
            return ()
        by_keys = self._mesh.config.context_attention == "keys"  # ranks have read rows of the same heads
        return self._mesh.coordinate("tensor"), 0 if by_keys else self._mesh.coordinate("context")

    def values(self) -> FloatArray:
        """Return WAAD and FAI of the loss tokens, 0 elsewhere, [T, 2]; after the forward."""
        result = np.zeros((self._length, 2), dtype=np.float32)
        for sequence, sums in zip(self._sequences, self.sums(), strict=True):
            result[sequence.places] = waad_and_fai(sums).cpu().numpy()
        return result

    def sums(self) -> list[HeadSums]:
        """Return the sums of each sequence with loss tokens, over the heads of all layers, after the forward.

        All ranks that compute the pack must call this.

        Raises:
            UnsupportedError: A layer was not read.
        """
        if self._left:
            raise UnsupportedError(
                f"the attention of layers {sorted(self._left)} cannot be read: it does not come from transformers' "
                "attention interface, or has no layer_idx"
            )
        found = [sequence.found for sequence in self._sequences]
        if (mesh := self._mesh) is not None:
            for axis in ("context", "tensor", "pipeline"):
                found = [_join(parts) for parts in zip(*mesh.all_gather(found, axis), strict=True)]
        of_all = ([parts[heads] for heads in sorted(parts)] for parts in found)
        return [HeadSums(*map(torch.cat, zip(*parts, strict=True))) for parts in of_all]


def _join(parts: Sequence[dict[tuple[int, ...], HeadSums]]) -> dict[tuple[int, ...], HeadSums]:
    """Join what ranks have read of a sequence; sums over rows of the same heads add up."""
    joined: dict[tuple[int, ...], HeadSums] = {}
    for heads, sums in chain.from_iterable(part.items() for part in parts):
        joined[heads] = joined[heads].plus(sums) if heads in joined else sums
    return joined
