"""Whatever is centred or divided, against exact rational arithmetic: equal values are worth exactly 0 beside each other, and
small differences on a large offset are kept."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example as case
from hypothesis import given
from hypothesis import strategies as st

from antiphon.algorithms.batch_arrays import whiten
from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.examples import example
from antiphon.algorithms.registry import ADVANTAGES
from antiphon.algorithms.rewards import EPSILON, Moments, trajectory_weights
from antiphon.algorithms.sections import LossWeightConfig
from antiphon.core.types import VALUES, Streams

from .stages_for_tests import taken_through

COMPARING = (
    "grpo",
    "dr_grpo",
    "rloo",
    "lite_ppo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "step_reinforce",
    "gigpo",
)
finite = st.floats(-1e12, 1e12)


def exact(values):
    """Each value less the mean, and the variance with Bessel's correction."""
    values = [Fraction(value) for value in values]
    middle = sum(values) / len(values)
    apart = [value - middle for value in values]
    return apart, sum(each * each for each in apart) / max(len(apart) - 1, 1)


def deviation(values, correction=1):
    apart, _ = exact(values)
    return math.sqrt(sum(each * each for each in apart) / (len(apart) - correction))


@pytest.mark.parametrize("name", COMPARING)
@case(0.9, 16)
@case(100.1, 16)
@case(10_000.1, 16)
@case(1e12 / 3, 7)
@case(1.5e308, 3)  # a sum of these is none
@given(reward=finite, siblings=st.integers(2, 16))
def test_equal_rewards_have_no_advantage(name, reward, siblings):
    groups = example([reward] * siblings, tokens=2, states=["start", "middle"])
    assert not any(array.any() for array in ADVANTAGES.resolve(name)(groups, AlgorithmConfig())[0])
    assert not any(sample.advantages.any() for sample in taken_through(groups, advantage=name).flat)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "lite_ppo", "step_reinforce", "gigpo"])
@given(one=finite, other=finite, siblings=st.integers(2, 9))
def test_each_equal_group_has_no_advantage(name, one, other, siblings):
    groups = example([one] * siblings, [other] * siblings)
    found = ADVANTAGES.resolve(name)(groups, AlgorithmConfig())
    assert not any(array.any() for arrays in found for array in arrays)


# Steps of 1e-3 to 1 on offsets up to 1e9, which single precision cannot tell apart.
steps = st.tuples(
    st.sampled_from([0.1, 10_000.1, -1e6 / 3, 1e9 + 0.1]),
    st.sampled_from([1e-3, 0.07, 1.0]),
    st.lists(st.integers(0, 9), min_size=2, max_size=8).filter(lambda found: len(set(found)) > 1),
)
ON_AN_OFFSET = (10_000.1, 1e-3, [0, 1, 1, 3])


@pytest.mark.parametrize("name", COMPARING)
@case(ON_AN_OFFSET)
@given(drawn=steps)
def test_small_differences_on_an_offset_survive(name, drawn):
    offset, size, counts = drawn
    values = [offset + size * count for count in counts]
    apart, variance = exact(values)
    by_deviation = [float(each) / (math.sqrt(variance) + EPSILON) for each in apart]
    by_population = [float(each) / (deviation(values, 0) + EPSILON) for each in apart]
    wanted = {
        "dr_grpo": [float(each) for each in apart],
        "rloo": [float(each * len(values) / (len(values) - 1)) for each in apart],
        "reinforce_plus_plus": by_population,
        "reinforce_plus_plus_baseline": by_population,
        "gigpo": [2 * each for each in by_deviation],
    }.get(name, by_deviation)
    groups = example(values, states=["start"])
    found = [float(array[1]) for array in ADVANTAGES.resolve(name)(groups, AlgorithmConfig())[0]]
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9 * max(map(abs, wanted)))


@case(ON_AN_OFFSET)
@given(drawn=steps)
def test_a_whitened_stage_keeps_small_differences(drawn):
    offset, size, counts = drawn
    values = [offset + size * count for count in counts]
    step = taken_through(example(values), advantage="reinforce", advantage_whiten=True)
    wanted = [float(each) / (deviation(values, 0) + EPSILON) for each in exact(values)[0]]
    np.testing.assert_allclose([sample.advantages[1] for sample in step.flat], wanted, rtol=1e-5, atol=1e-5)
    assert {sample.advantages.dtype for sample in step.flat} == {np.dtype(np.float32)}


@given(value=finite, siblings=st.integers(1, 16))
def test_equal_advantages_are_whitened_to_zero(value, siblings):
    groups = example([0.0] * siblings, tokens=3)
    arrays = [[value * sample.segment.loss_mask for sample in group] for group in groups]
    assert not any(array.any() for array in whiten(groups, arrays)[0])


@pytest.mark.parametrize("over", ["group", "batch", "running"])
@pytest.mark.parametrize("scale", ["none", "group", "batch", "running"])
@case(0.1, 3)
@case(10_000.1, 16)
@given(reward=finite, siblings=st.integers(2, 16))
def test_equal_scores_are_shaped_to_zero(over, scale, reward, siblings):
    groups = example([reward] * siblings, [reward] * siblings)
    step = taken_through(groups, advantage="reinforce", reward={"baseline": over, "scale": scale})
    assert [sample.reward for sample in step.flat] == [0.0] * 2 * siblings
    assert step.pipeline.algorithm_state.rewards.deviation == 0


@pytest.mark.parametrize("over", ["group", "batch", "running"])
@case(ON_AN_OFFSET)
@given(drawn=steps)
def test_shaped_scores_keep_small_differences(over, drawn):
    offset, size, counts = drawn
    values = [offset + size * count for count in counts]
    step = taken_through(example(values), advantage="reinforce", reward={"baseline": over, "scale": over})
    apart, variance = exact(values)
    divisor = math.sqrt(variance) + EPSILON
    rounding = 4 * math.ulp(max(map(abs, values))) / divisor  # a running mean is one number
    np.testing.assert_allclose(
        [sample.reward for sample in step.flat], [float(each) / divisor for each in apart], atol=rounding, rtol=1e-9
    )


@given(pieces=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=6))
def test_running_moments_on_an_offset(pieces):
    seen, values = Moments(), []
    for piece in pieces:
        values += [10_000.1 + 1e-3 * count for count in piece]
        seen.add(np.array(values[-len(piece) :]))
    wanted = deviation(values) if len(values) > 1 else 0.0
    assert seen.deviation == pytest.approx(wanted, rel=1e-6, abs=1e-11)


def test_a_mean_on_the_bound_is_not_inside():
    """Three scores of 0.1 have a mean of 0.1, and a sum of 0.30000000000000004."""
    metas = [[sample.meta for sample in group] for group in example([0.1] * 3, [0.2] * 3)]
    found = trajectory_weights(metas, LossWeightConfig(mask_difficulty=(0.1, 0.9)))
    assert [array.tolist() for array in found] == [[0.0] * 3, [1.0] * 3]


def test_critics_that_agree_on_each_token_mask_none():
    """Three equal numbers have no deviation, whatever they are: tokens do not differ in what rounding made of it."""
    rng = np.random.default_rng(0)
    groups = [
        [
            replace(
                sample,
                streams=Streams({VALUES: rng.normal(size=(51, 1)).astype(np.float32).repeat(3, axis=1)}),
            )
            for sample in group
        ]
        for group in example([1.0, 1.0], tokens=50)
    ]
    step = taken_through(groups, advantage="gae", agreement_mask=0.5)
    assert step.metrics["critic/spread"] == 0
    assert all(sample.advantages[1:].all() for sample in step.flat)
