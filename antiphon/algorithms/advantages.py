"""Advantages of whole batches of groups: pure numpy, one array [L] a segment.

Scores of usable trajectories always have a value: a trajectory without a verdict never reaches a group.
"""

from collections.abc import Callable, Sequence

import numpy as np

from antiphon.types import FloatArray, Group

SegmentArrays = list[list[list[FloatArray]]]  # [group][trajectory][segment] -> [L]
Advantages = Callable[[Sequence[Group]], SegmentArrays]

EPSILON = 1e-4  # of TRL and of DeepSeekMath's public code; below it a group's spread counts as none


def scores(group: Group) -> FloatArray:
    """The score of each trajectory, [G]."""
    return np.array([trajectory.meta.score.value for trajectory in group.trajectories], dtype=np.float32)


def grpo(groups: Sequence[Group]) -> SegmentArrays:
    """(score - group mean) / (group standard deviation + epsilon) on every sampled token.

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2; deviation with Bessel's correction as in its public code.
    """
    return [_on_sampled_tokens(group, _centred(group) / (scores(group).std(ddof=1) + EPSILON)) for group in groups]


def dr_grpo(groups: Sequence[Group]) -> SegmentArrays:
    """score - group mean on every sampled token; use with `aggregation: sequence_mean_token_sum_norm`.

    Source: Liu et al. 2025, "Understanding R1-Zero-like training", section 3.2.
    """
    return [_on_sampled_tokens(group, _centred(group)) for group in groups]


def _centred(group: Group) -> FloatArray:
    values = scores(group)
    centred: FloatArray = values - values.mean()
    return centred


def _on_sampled_tokens(group: Group, values: FloatArray) -> list[list[FloatArray]]:
    return [
        [np.where(segment.loss_mask, np.float32(value), np.float32(0)) for segment in trajectory.segments]
        for trajectory, value in zip(group.trajectories, values, strict=True)
    ]
