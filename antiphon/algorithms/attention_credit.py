"""Credit from the rhythm of attention: some tokens of a response have their advantage amplified. Pure numpy.

Two numbers a token are read from the model's attention (`learning/model/attention_stats.py`):

- WAAD is how far back the local heads look from the token. It rises where a chunk of text begins, and falls inside it.
- FAI is how much later tokens look back at the token through the global heads. It is high at anchors, on which the rest of
  the response depends.

Arrays here are those of one response: its R sampled tokens in order, several turns end to end. A function chooses tokens by
a weight w each, and gamma = 1 + (amplification - 1) w is what a token's advantage is multiplied with. A value of 0 is no
sign of anything and never chosen; so a response of one token, or one too short to have any FAI, keeps its advantages.

Source: Li et al. 2025, "Attention illuminates LLM reasoning", arXiv 2510.13554, second version.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from antiphon.algorithms.sections import RhythmConfig
from antiphon.core.rng import generator
from antiphon.core.types import ATTENTION_RHYTHM, POLICY_ENTROPY, BoolArray, FloatArray, Sample


def amplify_advantages(sample: Sample, advantages: np.ndarray, config: RhythmConfig) -> np.ndarray:
    """The sample's advantages [L] times gamma where it was sampled; with `positive_only` those below 0 as they are."""
    if config.kind is None:
        return advantages
    gamma = np.ones(len(advantages), dtype=np.float32)
    gamma[sample.segment.loss_mask] = amplification_factors(sample, config)
    return np.where(config.positive_only & (advantages < 0), advantages, advantages * gamma)


def amplification_factors(sample: Sample, config: RhythmConfig) -> FloatArray:
    """Gamma of the sampled tokens, [R], by `config.kind`, which is not null."""
    sampled = sample.segment.loss_mask
    match config.kind:
        case "random":  # the same whenever and wherever it is computed
            values = generator(0, "rhythm", *sample.meta.id).random(np.count_nonzero(sampled), dtype=np.float32)
            return _gamma(top_share(values, config.share), config)
        case "entropy":
            return _gamma(top_share(sample.streams[POLICY_ENTROPY][sampled], config.share), config)
        case _:
            waad, fai = sample.streams[ATTENTION_RHYTHM][sampled].T
            return credit(waad, fai, config)


def credit(waad: FloatArray, fai: FloatArray, config: RhythmConfig) -> FloatArray:
    """Gamma [R] by WAAD [R] and FAI [R]: the rule `local`, `global` or `coupled`. What is not a number is not chosen.

    >>> waad, fai = np.float32([1, 5, 4, 4]), np.float32([0.1, 0, 0.4, 0])
    >>> credit(waad, fai, RhythmConfig(kind="local", share=0.25))
    array([1.5, 1. , 1. , 1. ], dtype=float32)
    >>> credit(waad, fai, RhythmConfig(kind="global", share=0.25))
    array([1. , 1. , 1.5, 1. ], dtype=float32)
    """
    match config.kind:
        case "local":
            weights = local_chunk(waad, config)
        case "global":
            weights = global_anchor(fai, config)
        case _:
            weights = coupled(waad, fai, config)
    return _gamma(weights, config)


def local_chunk(waad: FloatArray, config: RhythmConfig) -> FloatArray:
    """1 at the `share` of tokens of the largest Delta, [R]. Source: the paper's local-chunk credit.

    >>> local_chunk(np.float32([1, 5, 4, 4, 1]), RhythmConfig())  # Delta is 4, 1, 0, 3, 0; two of five are chosen
    array([1., 0., 0., 1., 0.], dtype=float32)
    """
    return top_share(waad_deltas(waad), config.share).astype(np.float32)


def global_anchor(fai: FloatArray, config: RhythmConfig) -> FloatArray:
    """1 at the `share` of tokens of the largest FAI, [R]. Source: the paper's global-anchor credit.

    >>> global_anchor(np.float32([0.1, 0.4, 0.2, 0.2, 0]), RhythmConfig())  # of equals the first
    array([0., 1., 1., 0., 0.], dtype=float32)
    """
    return top_share(fai, config.share).astype(np.float32)


def coupled(waad: FloatArray, fai: FloatArray, config: RhythmConfig) -> FloatArray:
    """Weights [R] of global anchors, part of which goes back to the token that began the anchor's chunk.

    An anchor inside a chunk that began just before gives the share `back` of its weight to that token; any other keeps 1.

    An anchor t is such a one if its WAAD is at most the quantile `waad_quantile`, and the largest Delta of the `lookback`
    tokens before it, the first of equals, at least the quantile `delta_quantile`. A token that is chosen twice has the sum
    of both weights; one that begins a chunk for several anchors counts once. Source: the paper's coupled credit.

    >>> waad, fai = np.float32([1, 5, 1, 1, 3]), np.float32([0, 0, 0.4, 0, 0.3])
    >>> waad_deltas(waad)
    array([4., 4., 0., 2., 0.], dtype=float32)
    >>> coupled(waad, fai, RhythmConfig())  # anchors 2 and 4: WAAD is 1 at 2, the median, and 0 has begun its chunk
    array([0.5, 0. , 0.5, 0. , 1. ], dtype=float32)
    >>> coupled(waad, fai, RhythmConfig(lookback=1, back=0.25))  # now it is 1
    array([0.  , 0.25, 0.75, 0.  , 1.  ], dtype=float32)
    """
    weights = global_anchor(fai, config)
    if not len(waad):
        return weights
    delta, lookback = waad_deltas(waad), config.lookback
    before = sliding_window_view(np.concatenate([np.full(lookback, -np.inf), delta]), lookback)[: len(delta)]
    inside = (waad <= np.quantile(waad, config.waad_quantile)) & (
        before.max(1) >= np.quantile(delta, config.delta_quantile)
    )
    giving = np.flatnonzero((weights > 0) & inside)
    weights[giving] -= config.back
    weights[np.unique(giving - lookback + before[giving].argmax(1))] += config.back
    return weights


# --- pieces --------------------------------------------------------------------------------------------------------------


def waad_deltas(waad: FloatArray) -> FloatArray:
    """|WAAD of a token - WAAD of the next|, [R]; 0 for the last, which has none.

    >>> waad_deltas(np.float32([1, 5, 4]))
    array([4., 1., 0.], dtype=float32)
    """
    found: FloatArray = np.abs(np.diff(waad, append=waad[-1:]))
    return found


def top_share(values: FloatArray, share: float) -> BoolArray:
    """Select the largest of the values [R].

    The whole number nearest to share · R is selected, at least one; of equal values the first, and none that is not above 0.

    >>> top_share(np.float32([1, 3, 0, 3, 2]), 0.4)
    array([False,  True, False,  True, False])
    >>> top_share(np.float32([0, 0, 3]), 0.7)
    array([False, False,  True])
    """
    chosen = np.zeros(len(values), dtype=np.bool_)
    chosen[np.argsort(-values, kind="stable")[: max(1, round(share * len(values)))]] = True
    return chosen & (values > 0)


def _gamma(weights: FloatArray | BoolArray, config: RhythmConfig) -> FloatArray:
    return np.float32(1) + np.float32(config.amplification - 1) * weights.astype(np.float32)
