"""Losses and advantages against formulas written out independently, in plain Python."""

import math
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.algorithms.advantages import EPSILON, dr_grpo, grpo
from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.losses import LossInputs, k3_divergence, ppo_clip, total_loss
from antiphon.errors import ConfigError
from antiphon.types import (
    REFERENCE_LOGPROBS,
    AttemptId,
    AttemptStatus,
    Group,
    GroupOutcome,
    Message,
    PolicyVersion,
    Prompt,
    Score,
    Segment,
    Trajectory,
    TrajectoryMeta,
)

logprobs = st.floats(-8, -0.01)
tokens = st.lists(st.tuples(logprobs, logprobs, logprobs, st.floats(-3, 3)), min_size=1, max_size=8)


def inputs(rows, requires_grad=False) -> LossInputs:
    new, old, reference, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    return LossInputs(
        logprobs=new.requires_grad_(requires_grad),
        entropies=-new.detach(),
        behaviour=old,
        advantages=advantages,
        sequence=torch.zeros(len(rows), dtype=torch.long),
        streams={REFERENCE_LOGPROBS: reference},
    )


def clipped_loss(new: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(new - old)
    bounded = max(1 - low, min(1 + high, ratio))
    return -min(ratio * advantage, bounded * advantage)


@given(rows=tokens, low=st.floats(0.01, 0.9), high=st.floats(0.01, 2))
def test_ppo_clip(rows, low, high):
    loss, metrics = ppo_clip(inputs(rows), AlgorithmConfig(clip_low=low, clip_high=high))
    expected = [clipped_loss(new, old, advantage, low, high) for new, old, _, advantage in rows]
    np.testing.assert_allclose(loss, expected, rtol=1e-9, atol=1e-12)
    for (new, old, _, advantage), clipped in zip(rows, metrics["clip_fraction"], strict=True):
        outside = math.exp(new - old) > 1 + high if advantage > 0 else math.exp(new - old) < 1 - low
        assert bool(clipped) == (outside and advantage != 0)


@given(rows=tokens, entropy=st.floats(0, 1), kl=st.floats(0.001, 1))
def test_terms_around_the_loss(rows, entropy, kl):
    config = AlgorithmConfig(entropy_coefficient=entropy, kl_coefficient=kl)
    loss, metrics = total_loss(ppo_clip, inputs(rows), config)
    for value, divergence, (new, old, reference, advantage) in zip(loss, metrics["reference_kl"], rows, strict=True):
        k3 = math.exp(reference - new) - (reference - new) - 1
        assert float(divergence) == pytest.approx(k3, rel=1e-9, abs=1e-12)
        expected = clipped_loss(new, old, advantage, 0.2, 0.2) + entropy * new + kl * k3
        assert float(value) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_k3_estimates_the_divergence_without_bias():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    expected = float((policy * (policy / reference).log()).sum())
    assert float((policy * k3_divergence(policy.log(), reference.log())).sum()) == pytest.approx(expected)


def test_a_loss_that_aggregates_itself_is_refused():
    with pytest.raises(ConfigError, match=r"returned shape \(\), expected \(2,\)"):
        total_loss(lambda i, c: (i.logprobs.mean(), {}), inputs([(-1, -1, -1, 1)] * 2), AlgorithmConfig())


def group_with(scores: list[float]) -> Group:
    def trajectory(sibling: int, score: float) -> Trajectory:
        length = sibling + 2
        mask = np.arange(length) > 0
        segment = Segment(
            tokens=np.zeros(length, np.int32),
            loss_mask=mask,
            logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
            turns=(),
        )
        meta = TrajectoryMeta(
            id=AttemptId(0, sibling, 0),
            prompt_id="p",
            task="t",
            started=PolicyVersion(0, 0),
            newest=PolicyVersion(0, 0),
            status=AttemptStatus.FINISHED,
            score=Score.of(score),
        )
        return Trajectory(meta=meta, payload=(segment,))

    prompt = Prompt(id="p", task="t", messages=(Message("user", "?"),))
    trajectories = tuple(trajectory(i, score) for i, score in enumerate(scores))
    return Group(id=0, prompt=prompt, trajectories=trajectories, outcome=GroupOutcome.COMPLETE)


@given(st.lists(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=6), min_size=1, max_size=4))
def test_group_advantages(batches):
    groups = [group_with(scores) for scores in batches]
    for estimate, scale in ((grpo, lambda s: stdev(s) + EPSILON), (dr_grpo, lambda s: 1.0)):
        for scores, per_trajectory in zip(batches, estimate(groups), strict=True):
            for score, (array,) in zip(scores, per_trajectory, strict=True):
                expected = (score - mean(scores)) / scale(scores)
                assert array[0] == 0, "a token that was not sampled has no advantage"
                np.testing.assert_allclose(array[1:], expected, rtol=1e-3, atol=1e-3)


def test_advantages_of_a_group_do_not_depend_on_the_others():
    one, two = group_with([0, 1, 1]), group_with([3, -2])
    alone, together = grpo([one]), grpo([two, one])
    for a, b in zip(alone[0], together[1], strict=True):
        np.testing.assert_array_equal(a[0], b[0])


def test_equal_scores_have_no_advantage():
    assert all(not array.any() for (array,) in grpo([group_with([0.3, 0.3, 0.3])])[0])
