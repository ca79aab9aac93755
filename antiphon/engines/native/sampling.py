"""Drawing tokens: one uniform number a token, inverted through the cumulative distribution.

The number depends on the request's seed and the token's position in its sequence only. So a sample does not depend on
who shares the batch, and a request that is taken up elsewhere from the tokens it already has draws the same.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]

# Block of the two-level cumulative sum. Sums of blocks vectorise, running sums do not: only one block a row needs one.
_BLOCK = 256
# Top-p looks at this many likeliest tokens before it sorts the vocabulary.
_NUCLEUS = 256


def uniform_numbers(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) [R], a hash (splitmix64's finaliser, twice) of each seed and position."""
    mixed = _mix(_mix(seeds) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of each row of logits; arrays [R] on the host."""

    temperature: Floats  # 0: greedy
    top_p: Floats
    top_k: NDArray[np.int64]  # 0: no limit
    min_p: Floats
    uniform: NDArray[np.float64]
    support: NDArray[np.int64]  # most tokens of the support that is recorded; 0: it is not

    def rows(self, chosen: NDArray[Any]) -> "SamplingParams":
        """Return the parameters of some rows."""
        return SamplingParams(*(getattr(self, name)[chosen] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens drawn, one a row."""

    tokens: NDArray[np.int64]  # [R]
    logprobs: Floats  # [R]
    support: NDArray[np.int32] | None = None  # [R, K] see `SAMPLING_SUPPORT`; None if no row's is recorded

    def rows(self, chosen: NDArray[Any]) -> "Drawn":
        """Return what was drawn for some rows."""
        support = None if self.support is None else self.support[chosen]
        return Drawn(self.tokens[chosen], self.logprobs[chosen], support)


def sample(logits: Tensor, draw: SamplingParams) -> Drawn:
    """Sample a token from each row of logits [R, V], which are overwritten.

    Log-probabilities are of the whole vocabulary at the row's temperature (1 where it is 0), whatever top-p, top-k and
    min-p cut off; of what they leave where the support is recorded. Without a support, one copy from the device to the host is
    all the waiting there is.
    """
    greedy = draw.temperature == 0
    logits = logits.float()
    if np.any(draw.temperature[~greedy] != 1.0):
        scale = np.where(greedy, 1.0, draw.temperature).astype(np.float32)
        logits.div_(torch.from_numpy(scale).to(logits.device, non_blocking=True)[:, None])
    best = logits.argmax(-1) if greedy.any() else None  # costs five times what the maximum alone does
    mass = logits.sub_(logits.amax(-1, keepdim=True)).exp_()  # the likeliest token has 1
    support = _keep_support(mass, draw)
    blocks = _block_sums(mass)
    total = blocks.sum(-1, dtype=torch.float64)
    chosen = best if best is not None and greedy.all() else _sample_rows(mass, blocks, draw)
    if best is not None and not greedy.all():
        chosen = torch.where(torch.from_numpy(greedy).to(chosen.device), best, chosen)
    # Below the smallest normal number exp has lost precision, but such a token is drawn once in 1e37.
    weight = mass.gather(-1, chosen[:, None])[:, 0].double()
    packed = torch.stack([chosen.double(), weight.log() - total.log()]).cpu().numpy()
    return Drawn(packed[0].astype(np.int64), packed[1].astype(np.float32), support)


def _keep_support(mass: Tensor, draw: SamplingParams) -> NDArray[np.int32] | None:
    """Remove from `mass` [R, V] what the rows with a recorded support exclude; return the support [R, K], see `Drawn`."""
    recorded = np.flatnonzero(draw.support)
    if not len(recorded):
        return None
    rows = torch.from_numpy(recorded).to(mass.device, non_blocking=True)
    kept, tokens = truncate_ranked(mass[rows], draw.rows(recorded))
    mass[rows] = torch.zeros_like(mass[rows]).scatter_(1, tokens, kept)
    support = np.zeros((len(draw.support), tokens.shape[1]), np.int32)
    support[recorded] = torch.where(kept > 0, tokens + 1, 0).int().cpu().numpy()
    return support


def truncate_ranked(mass: Tensor, draw: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the mass of the likeliest tokens [R, K], 0 for those that are excluded, and the tokens [R, K].

    As `truncate_mass`, for rows with a `support`, of tied tokens only as many as there is room for.
    """
    most = min(int(draw.support.max()), mass.shape[1])
    limit, top_p, min_p = (torch.from_numpy(array).to(mass.device) for array in (draw.support, draw.top_p, draw.min_p))
    kept, tokens = mass.topk(most)
    kept.masked_fill_(torch.arange(most, device=mass.device) >= limit[:, None], 0)
    before = kept.cumsum(-1, dtype=torch.float64) - kept
    outside = (before >= top_p.double()[:, None] * kept.sum(-1, keepdim=True, dtype=torch.float64)) & (top_p < 1)[
        :, None
    ]
    return kept.masked_fill_(outside | (kept < min_p[:, None]), 0), tokens


def _sample_rows(mass: Tensor, blocks: Tensor, draw: SamplingParams) -> Tensor:
    cut = (draw.temperature > 0) & ((draw.top_p < 1) | (draw.top_k > 0) | (draw.min_p > 0)) & (draw.support == 0)
    uniform = torch.from_numpy(draw.uniform).to(mass.device, non_blocking=True)
    if not cut.any():
        return sample_inverse_cdf(mass, blocks, uniform)
    rows = torch.from_numpy(np.flatnonzero(cut)).to(mass.device, non_blocking=True)
    kept = truncate_mass(mass[rows], draw.rows(cut))
    if cut.all():
        return sample_inverse_cdf(kept, _block_sums(kept), uniform)
    return sample_inverse_cdf(mass, blocks, uniform).index_copy_(
        0, rows, sample_inverse_cdf(kept, _block_sums(kept), uniform[rows])
    )


def _block_sums(mass: Tensor) -> Tensor:
    rows, vocabulary = mass.shape
    whole = vocabulary // _BLOCK * _BLOCK
    sums = mass[:, :whole].reshape(rows, -1, _BLOCK).sum(-1)
    return sums if whole == vocabulary else torch.cat([sums, mass[:, whole:].sum(-1, keepdim=True)], 1)


def sample_inverse_cdf(mass: Tensor, blocks: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token [R] at which the running sum of `mass` [R, V] exceeds the share `uniform` [R] of its total.

    `blocks` are the sums of blocks of `mass`. A token without mass is never returned.
    """
    running = blocks.double().cumsum(-1)
    block, before = _first_above(running, uniform * running[:, -1], uniform * running[:, -1])
    columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=mass.device)
    inside = mass.gather(-1, columns.clamp(max=mass.shape[1] - 1)).double()
    inside.masked_fill_(columns >= mass.shape[1], 0)
    token, _ = _first_above(inside.cumsum(-1), before, before)
    return block * _BLOCK + token


def _first_above(running: Tensor, target: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first of `running` above `target`, and `rest` less the sum before that index.

    Rounding may put a target at or past the end; it is lowered below the end, so that the sum rises at the index.
    """
    end = running[:, -1]
    target = torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))
    index = (running <= target[:, None]).sum(-1)
    before = torch.where(index > 0, running.gather(-1, (index - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    return index, (torch.minimum(rest, target) - before).clamp_(min=0)


def truncate_mass(mass: Tensor, draw: SamplingParams) -> Tensor:
    """Return `mass` [R, V] with what top-k, top-p and min-p exclude set to zero.

    In the order of the field: the k likeliest (and what ties with the last of them), then the fewest of those that hold
    `top_p` of their mass, then those with at least `min_p` of the likeliest. Mass is relative: the largest of a row is 1.
    """
    floor = torch.from_numpy(draw.min_p).to(mass.device)
    if np.any(draw.top_k > 0) or np.any(draw.top_p < 1):
        floor = torch.maximum(floor, _rank_floor(mass, draw))
    return mass.masked_fill(mass < floor[:, None], 0)


def _rank_floor(mass: Tensor, draw: SamplingParams) -> Tensor:
    """The least mass that top-k and top-p leave in each row [R]."""
    vocabulary = mass.shape[1]
    limit = np.where((draw.top_k > 0) & (draw.top_k < vocabulary), draw.top_k, vocabulary)
    unlimited = (limit == vocabulary) & (draw.top_p < 1)
    width = min(max(int(limit[limit < vocabulary].max(initial=1)), _NUCLEUS if unlimited.any() else 1), vocabulary)
    ranked = mass.topk(width).values
    if width < vocabulary and unlimited.any() and _falls_short(mass, ranked, draw, unlimited):
        ranked = mass.sort(-1, descending=True).values
    width = ranked.shape[1]
    limits = torch.from_numpy(limit).to(mass.device)
    kth = ranked.gather(-1, (limits.clamp(max=width) - 1)[:, None])
    kth = torch.where((limits < vocabulary)[:, None], kth, 0.0)
    within = ranked.masked_fill(ranked < kth, 0).double()
    # With ties at the k-th place top-p counts the tied tokens that the ranking shows; without top-k it counts all.
    whole = torch.where(limits < vocabulary, within.sum(-1), mass.sum(-1, dtype=torch.float64))
    top_p = torch.from_numpy(draw.top_p.astype(np.float64)).to(mass.device)
    needed = (within.cumsum(-1) - within < (top_p * whole)[:, None]).sum(-1).clamp(min=1)
    nucleus = ranked.gather(-1, (needed.clamp(max=width) - 1)[:, None])
    nucleus = torch.where((top_p < 1)[:, None], nucleus, 0.0)
    return torch.maximum(kth, nucleus)[:, 0]


def _falls_short(mass: Tensor, ranked: Tensor, draw: SamplingParams, rows: NDArray[np.bool_]) -> bool:
    """True if the ranked tokens hold less than top-p in one of `rows`. Waits for the device; only top-p comes here."""
    held = (ranked.sum(-1, dtype=torch.float64) / mass.sum(-1, dtype=torch.float64)).cpu().numpy()
    return bool(np.any(held[rows] < draw.top_p[rows]))
