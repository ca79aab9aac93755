"""Advantages of whole batches of groups: pure numpy, one array [L] a segment.

Scores of usable trajectories always have a value: a trajectory without a verdict never reaches a group. What an advantage
makes of the scores of its groups is a function of its own, on arrays [G]; here every sampled token of a trajectory gets it.
"""

from collections.abc import Callable, Sequence

import numpy as np

from antiphon.types import FloatArray, Group

SegmentArrays = list[list[list[FloatArray]]]  # [group][trajectory][segment] -> [L]
Advantages = Callable[[Sequence[Group]], SegmentArrays]

EPSILON = 1e-4  # of TRL and of DeepSeekMath's public code; below it a group's spread counts as none


def grpo(groups: Sequence[Group]) -> SegmentArrays:
    """(score - group mean) / (group standard deviation + epsilon).

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2; deviation with Bessel's correction as in its public code.
    """
    return _on_sampled_tokens(groups, [centred(s) / (s.std(ddof=1) + EPSILON) for s in map(scores, groups)])


def dr_grpo(groups: Sequence[Group]) -> SegmentArrays:
    """score - group mean; use with `aggregation: sequence_mean_token_sum_norm`.

    Source: Liu et al. 2025, "Understanding R1-Zero-like training", section 3.2.
    """
    return _on_sampled_tokens(groups, [centred(s) for s in map(scores, groups)])


def rloo(groups: Sequence[Group]) -> SegmentArrays:
    """score - mean of the other scores of the group.

    Source: Ahmadian et al. 2024, "Back to basics", section 3.3; Kool et al. 2019.
    """
    return _on_sampled_tokens(groups, [left_out(s) for s in map(scores, groups)])


def reinforce(groups: Sequence[Group]) -> SegmentArrays:
    """The score: no baseline, so groups of one do. Source: Williams 1992."""
    return _on_sampled_tokens(groups, [scores(group) for group in groups])


def lite_ppo(groups: Sequence[Group]) -> SegmentArrays:
    """(score - group mean) / (standard deviation of the batch + epsilon).

    Source: Liu et al. 2025, "Part I: Tricks or traps? A deep dive into RL for LLM reasoning".
    """
    deviation = np.concatenate([scores(group) for group in groups]).std(ddof=1) if groups else 0.0
    return _on_sampled_tokens(groups, [centred(s) / (deviation + EPSILON) for s in map(scores, groups)])


def reinforce_plus_plus(groups: Sequence[Group]) -> SegmentArrays:
    """The score, whitened over all sampled tokens of the batch; groups of one do.

    Source: Hu 2025, "REINFORCE++".
    """
    return whitened(reinforce(groups), groups)


def reinforce_plus_plus_baseline(groups: Sequence[Group]) -> SegmentArrays:
    """score - group mean, whitened over all sampled tokens of the batch.

    Source: Hu 2025, "REINFORCE++", its variant with a baseline.
    """
    return whitened(dr_grpo(groups), groups)


# --- pieces --------------------------------------------------------------------------------------------------------------


def scores(group: Group) -> FloatArray:
    """The score of each trajectory, [G]."""
    return np.array([trajectory.meta.score.value for trajectory in group.trajectories], dtype=np.float32)


def centred(values: FloatArray) -> FloatArray:
    """Values [G] less their mean.

    >>> centred(np.float32([0, 1, 2]))
    array([-1.,  0.,  1.], dtype=float32)
    """
    found: FloatArray = values - values.mean()
    return found


def left_out(values: FloatArray) -> FloatArray:
    """Values [G], each less the mean of the others.

    >>> left_out(np.float32([0, 1, 2]))
    array([-1.5,  0. ,  1.5], dtype=float32)
    """
    count = len(values)
    found: FloatArray = centred(values) * np.float32(count / (count - 1))
    return found


def whitened(arrays: SegmentArrays, groups: Sequence[Group]) -> SegmentArrays:
    """Less their mean and divided by their deviation over all sampled tokens of the batch; the rest stays 0."""
    masks = [segment.loss_mask for group in groups for t in group.trajectories for segment in t.segments]
    flat = [array for per_group in arrays for per_trajectory in per_group for array in per_trajectory]
    sampled = np.concatenate(
        [array[mask] for array, mask in zip(flat, masks, strict=True)] or [np.zeros(0, np.float32)]
    )
    if not len(sampled):
        return arrays
    mean, deviation = sampled.mean(dtype=np.float64), sampled.std(dtype=np.float64) + EPSILON
    left = iter(masks)
    return [
        [
            [np.where(next(left), (array - mean) / deviation, 0).astype(np.float32) for array in per_trajectory]
            for per_trajectory in per_group
        ]
        for per_group in arrays
    ]


def _on_sampled_tokens(groups: Sequence[Group], values: Sequence[FloatArray]) -> SegmentArrays:
    return [
        [
            [np.where(segment.loss_mask, np.float32(value), np.float32(0)) for segment in trajectory.segments]
            for trajectory, value in zip(group.trajectories, per_trajectory, strict=True)
        ]
        for group, per_trajectory in zip(groups, values, strict=True)
    ]
