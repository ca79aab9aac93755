"""Credit by rhythm against the paper's formulas written out in plain Python, and its edges."""

import doctest
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from antiphon.algorithms import attention_credit as rhythm
from antiphon.algorithms.attention_credit import (
    amplification_factors,
    amplify_advantages,
    credit,
    top_share,
    waad_deltas,
)
from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.sections import RhythmConfig
from antiphon.core.types import (
    ATTENTION_RHYTHM,
    POLICY_ENTROPY,
    AttemptId,
    AttemptStatus,
    PolicyVersion,
    Sample,
    Score,
    Segment,
    Streams,
    TrajectoryMeta,
)

# Few different values, so that equals are frequent; sixteenths, so that every sum is exact.
sixteenths = st.integers(0, 12).map(lambda n: n / 16)
responses = st.lists(st.tuples(sixteenths, sixteenths), max_size=24)
shares = st.sampled_from([1 / 16, 0.25, 0.4, 0.5, 1.0])
configs = st.builds(
    RhythmConfig,
    kind=st.sampled_from(["local", "global", "coupled"]),
    amplification=st.sampled_from([0.5, 1.0, 1.5, 3.0]),
    share=shares,
    waad_quantile=st.sampled_from([0.0, 0.5, 1.0]),
    delta_quantile=st.sampled_from([0.0, 0.5, 1.0]),
    back=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    lookback=st.integers(1, 5),
)


def columns(response):
    return [np.array([row[column] for row in response], dtype=np.float32) for column in (0, 1)]


# --- the formulas, once more ---------------------------------------------------------------------------------------------


def best(values, share):
    """The places of the largest, of equals the first, and never those of 0."""
    ranked = sorted(range(len(values)), key=lambda t: (-values[t], t))
    return {t for t in ranked[: max(1, round(share * len(values)))] if values[t] > 0}


def differences(waad):
    return [abs(a - b) for a, b in pairwise(waad)] + [0.0] * bool(waad)


def quantile(values, q):
    """By linear interpolation between the sorted values."""
    ranked, place = sorted(values), q * (len(values) - 1)
    low, high = ranked[math.floor(place)], ranked[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def written_out(waad, fai, config):
    """Gamma as the paper has it: 1 + (amplification - 1) [indicators]."""
    delta, anchors = differences(waad), best(fai, config.share)
    if config.kind == "local":
        return [1 + (config.amplification - 1) * (t in best(delta, config.share)) for t in range(len(waad))]
    if config.kind == "global":
        return [1 + (config.amplification - 1) * (t in anchors) for t in range(len(waad))]
    dependent, introductory = set(), set()
    for t in anchors:
        before = range(max(0, t - config.lookback), t)
        if not before or waad[t] > quantile(waad, config.waad_quantile):
            continue
        peak = max(delta[u] for u in before)
        if peak >= quantile(delta, config.delta_quantile):
            dependent.add(t)
            introductory.add(next(u for u in before if delta[u] == peak))
    return [
        1
        + (config.amplification - 1)
        * ((t in anchors - dependent) + (1 - config.back) * (t in dependent) + config.back * (t in introductory))
        for t in range(len(waad))
    ]


def test_examples():
    result = doctest.testmod(rhythm)
    assert result.attempted and not result.failed


@given(response=responses, config=configs)
def test_credit_is_the_papers(response, config):
    waad, fai = columns(response)
    found = credit(waad, fai, config)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, written_out(waad.tolist(), fai.tolist(), config), rtol=1e-6)


@given(response=responses, share=shares)
def test_pieces(response, share):
    values = columns(response)[0]
    assert waad_deltas(values).tolist() == differences(values.tolist())
    assert set(np.flatnonzero(top_share(values, share)).tolist()) == best(values.tolist(), share)


def test_coupled_by_hand():
    """Anchors are 3, 6 and 8, the three of the largest FAI. 3 and 6 lie inside chunks, for their WAAD is not above the median,
    1, as that of 8 is. Of the two tokens before 3 both have a Delta of 6, and the first began its chunk; of those before 6
    it is 4, by a Delta of 4. Both are above the quantile of Delta, 2.2. 3 and 6 keep 0.75 each and give 0.25."""
    waad = np.float32([1, 1, 7, 1, 5, 1, 1, 1, 2, 1])
    fai = np.float32([0, 0.1, 0, 0.5, 0, 0, 0.4, 0, 0.3, 0])
    assert waad_deltas(waad).tolist() == [0, 6, 6, 4, 4, 0, 0, 1, 1, 0]
    config = RhythmConfig(kind="coupled", amplification=2.0, share=0.3, back=0.25, lookback=2)
    assert credit(waad, fai, config).tolist() == [1, 1.25, 1, 1.75, 1.25, 1, 1.75, 1, 2, 1]


@pytest.mark.parametrize("kind", ["local", "global", "coupled"])
@pytest.mark.parametrize("waad, fai", [([], []), ([3.0], [0.5]), ([2.0] * 6, [0.0] * 6), ([0.0] * 6, [0.25] * 6)])
def test_edges(kind, waad, fai):
    """Empty, one token, all equal: no Delta is a peak; FAI has its first ones, or none if it is nowhere."""
    config = RhythmConfig(kind=kind)
    found = credit(np.float32(waad), np.float32(fai), config).tolist()
    assert found == pytest.approx(written_out(waad, fai, config))
    if kind == "local" or not any(fai):
        assert found == [1.0] * len(waad)


@pytest.mark.parametrize("kind", ["local", "global", "coupled"])
def test_what_is_no_number_is_not_chosen(kind):
    waad, fai = np.float32([1, np.nan, 3, 1]), np.float32([0.5, np.nan, 0.25, np.nan])
    assert np.isfinite(credit(waad, fai, RhythmConfig(kind=kind))).all()


# --- of a sample ---------------------------------------------------------------------------------------------------------


def sample(mask, logprobs=None, waad=None, fai=None, entropy=None, sibling=0) -> Sample:
    zeros = np.zeros(len(mask), np.float32)
    streams = Streams()
    if waad is not None:
        streams = streams.with_stream(ATTENTION_RHYTHM, np.stack([np.float32(waad), np.float32(fai)], -1))
    if entropy is not None:
        streams = streams.with_stream(POLICY_ENTROPY, np.float32(entropy))
    version = PolicyVersion(0, 0)
    return Sample(
        meta=TrajectoryMeta(
            id=AttemptId(3, sibling, 0),
            prompt_id="p",
            task="t",
            started=version,
            newest=version,
            status=AttemptStatus.FINISHED,
            score=Score.of(1.0),
        ),
        segment=Segment(
            tokens=zeros.astype(np.int32),
            loss_mask=np.array(mask, np.bool_),
            logprobs=zeros if logprobs is None else np.float32(logprobs),
            versions=zeros.astype(np.int32),
            turns=(),
        ),
        streams=streams,
        advantages=zeros,
        weights=zeros + 1,
    )


def test_several_turns_are_one_response():
    """The token after the last of a turn is the first of the next; what lies between has no part."""
    mask, waad = [0, 1, 1, 0, 0, 1, 1], [9, 1, 2, 9, 0, 7, 7]
    given = sample(mask, waad=waad, fai=np.zeros(7))
    config = RhythmConfig(kind="local", share=0.25)  # Delta is 1, 5, 0, 0
    assert amplify_advantages(given, np.float32([0, 2, 2, 0, 0, 2, 2]), config).tolist() == [0, 2, 3, 0, 0, 2, 2]


@pytest.mark.parametrize("positive_only, wanted", [(False, [1, -3, 0.75, -1]), (True, [1, -2, 0.75, -1])])
def test_signs(positive_only, wanted):
    config = RhythmConfig(kind="global", share=0.5, positive_only=positive_only)
    given = sample([1, 1, 1, 1], waad=[0, 0, 0, 0], fai=[0.1, 0.3, 0.2, 0])
    assert amplify_advantages(given, np.float32([1, -2, 0.5, -1]), config).tolist() == wanted


def test_no_kind_changes_nothing():
    advantages = np.float32([1, -1])
    assert amplify_advantages(sample([1, 1]), advantages, RhythmConfig()) is advantages


def test_tokens_of_high_entropy():
    config = RhythmConfig(kind="entropy", share=0.5)
    given = sample([0, 1, 1, 1, 1], entropy=[9, 0.5, 2, 0, 1])
    assert amplification_factors(given, config).tolist() == [1, 1.5, 1, 1.5]


def test_tokens_at_random():
    """... are the same for an attempt whenever they are drawn, others for its sibling, and as many as any rule chooses."""
    config = RhythmConfig(kind="random")
    mask = [False] * 10 + [True] * 50
    first, again, sibling = (amplification_factors(sample(mask, sibling=number), config) for number in (0, 0, 1))
    assert first.tolist() == again.tolist() != sibling.tolist()
    assert {*first.tolist()} == {1.0, 1.5} and np.count_nonzero(first == 1.5) == 20
    chosen = sum(amplification_factors(sample(mask, sibling=number), config) == 1.5 for number in range(300))
    assert chosen.min() > 80 and chosen.max() < 160  # of 300 times 0.4: 120, give or take 4.7 deviations


def test_configuration():
    assert AlgorithmConfig().rhythm == RhythmConfig(kind=None)
    kinds = ("local", "global", "coupled", "random", "entropy", None)
    assert [RhythmConfig(kind=kind).reads_attention for kind in kinds] == [True] * 3 + [False] * 3
    with pytest.raises(ValidationError, match="horizon_low"):
        RhythmConfig(horizon_high=9)
