"""Shaping of scores into rewards, and weights of trajectories. Pure numpy, one array [G] a group.

Both are computed over the whole batch, so neither depends on how it is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from antiphon.algorithms.normalization import EPSILON, center, stable_mean, standard_deviation
from antiphon.algorithms.sections import KlConfig, LossWeightConfig, NormalizationScope, RewardConfig
from antiphon.core.types import FloatArray, TrajectoryMeta

Metas = Sequence[Sequence[TrajectoryMeta]]  # [group][trajectory]


@dataclass(slots=True)
class Moments:
    """Running mean and standard deviation of all values added, in double precision.

    Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".

    >>> seen = Moments()
    >>> seen.add(np.array([1.0, 2.0])); seen.add(np.array([6.0]))
    >>> seen.mean, round(seen.deviation, 4)
    (3.0, 2.6458)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def add(self, values: np.ndarray) -> None:
        """Add values [N]."""
        if not len(values):
            return
        count = self.count + len(values)
        apart = stable_mean(values) - self.mean
        self.squares += float(np.square(center(values)).sum())
        self.squares += apart**2 * self.count * len(values) / count
        self.mean += apart * (len(values) / count)  # all of it at first, to the last bit
        self.count = count

    @property
    def deviation(self) -> float:
        """With Bessel's correction; 0 of less than two values."""
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0


@dataclass(slots=True)
class AlgorithmState:
    """State that an algorithm keeps from step to step; part of a checkpoint, under the name `controllers`."""

    rewards: Moments = field(default_factory=Moments)  # of all scores so far
    kl: float | None = None  # the adapted KL coefficient; None before the first adaptation

    def adapt(self, config: KlConfig, seen: float, trajectories: int) -> None:
        """Move the coefficient of the divergence towards where `seen`, its mean a token, meets the target.

        Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", section 2.2.

        >>> memory = AlgorithmState()
        >>> memory.adapt(KlConfig(coefficient=0.1, place="reward", target=0.5, horizon=100), seen=5.0, trajectories=50)
        >>> round(memory.kl, 4)  # at most a fifth, for half of the horizon
        0.11
        """
        error = min(max(seen / config.target - 1, -0.2), 0.2)
        self.kl = (config.coefficient if self.kl is None else self.kl) * (
            1 + error * min(trajectories / config.horizon, 1)
        )


def restore_algorithm_state(state: dict[str, Any] | None) -> AlgorithmState:
    """Return the state from the dictionary that `dataclasses.asdict` made; a new one for None."""
    return AlgorithmState() if state is None else AlgorithmState(rewards=Moments(**state["rewards"]), kl=state["kl"])


class ShapedRewards(NamedTuple):
    """Rewards of a group, and the divisor of the rewards of its turns; None where turns have no share in the rewards."""

    rewards: np.ndarray  # [G]
    turn_divisor: float | None


def shape_rewards(groups: Metas, config: RewardConfig, seen: Moments, max_tokens: int) -> list[ShapedRewards]:
    """Return the rewards of each group: scores minus the penalty for length and a baseline, divided by a deviation, clipped.

    `scale` divides the rewards of turns too. The penalty for length goes to the last turn, which made the response too long. A
    baseline and clipping change the reward of a whole trajectory only.

    Source: the penalty for length is the soft overlong punishment of Yu et al. 2025, "DAPO", eq. 13.

    Args:
        groups: Trajectories of each group.
        config: What is applied.
        seen: Moments of all scores so far; those of this batch are added first.
        max_tokens: Token limit of a completion.
    """
    raw = [_scores(group) - _overlong(group, config, max_tokens) for group in groups]
    for values in raw:
        seen.add(values)
    found = []
    tasks = [group[0].task if group else "" for group in groups]
    centred, divisors = _less_baseline(raw, config.baseline, tasks, seen), _divisors(raw, config.scale, tasks, seen)
    for values, divisor in zip(centred, divisors, strict=True):
        values = values / divisor
        values = np.clip(values, -config.clip, config.clip) if config.clip else values
        found.append(ShapedRewards(values, None if config.without_turns else divisor))
    return found


def _less_baseline(
    raw: Sequence[np.ndarray], over: NormalizationScope, tasks: Sequence[str], seen: Moments
) -> list[np.ndarray]:
    """Subtract from the values [G] of each group the mean over the group, its task, the batch, or all values so far."""
    if over == "none":
        return list(raw)
    if over == "running":
        return [values - seen.mean for values in raw]
    found = list(raw)
    for numbers in _taken_together(over, tasks):
        whole = center(np.concatenate([raw[number] for number in numbers]))
        ends = np.cumsum([len(raw[number]) for number in numbers])
        for number, part in zip(numbers, np.split(whole, ends[:-1]), strict=True):
            found[number] = part
    return found


def _divisors(raw: Sequence[np.ndarray], over: NormalizationScope, tasks: Sequence[str], seen: Moments) -> list[float]:
    """Return the standard deviation plus epsilon for each group, over the same; 1 where it is 0."""
    found = [seen.deviation if over == "running" else 0.0] * len(raw)
    if over not in ("none", "running"):
        for numbers in _taken_together(over, tasks):
            deviation = standard_deviation(np.concatenate([raw[number] for number in numbers]))
            for number in numbers:
                found[number] = deviation
    return [each + EPSILON if each > EPSILON else 1.0 for each in found]


def _taken_together(over: NormalizationScope, tasks: Sequence[str]) -> list[list[int]]:
    """Return the numbers of the groups that are normalized together: each alone, those of a task, or all."""
    together: dict[object, list[int]] = {}
    for number, task in enumerate(tasks):
        together.setdefault({"group": number, "task": task}.get(over), []).append(number)
    return list(together.values())


def trajectory_weights(groups: Metas, config: LossWeightConfig) -> list[FloatArray]:
    """Return how much each trajectory counts in the loss.

    Masked trajectories have weight 0; the others are weighted by `config.by`, with mean 1 over the batch. By difficulty: from
    0.5 where the mean score of the group is 1 to 2 where it is 0. By length: from 1.5 for none to 0.5 for the longest of the
    batch.

    Source: ROLL (Wang et al. 2025), which computes them within a micro-batch.
    """
    longest = max((meta.completion_tokens for group in groups for meta in group), default=0)
    found = []
    for group in groups:
        scores = _scores(group)
        lengths = np.array([meta.completion_tokens for meta in group])
        values = np.ones(len(group))
        if config.by == "difficulty":
            values += 1 - 1.5 * np.clip(stable_mean(scores), 0, 1)
        elif config.by == "length":
            values += 0.5 - lengths / max(longest, 1)
        if config.mask_truncated:
            values *= [not meta.truncated for meta in group]
        if config.mask_difficulty is not None:
            low, high = config.mask_difficulty
            values *= low < stable_mean(scores) < high
        if config.mask_wrong_over:
            values *= (scores > 0) | (lengths <= config.mask_wrong_over)
        found.append(values)
    total = sum(values.sum() for values in found)
    counted = sum(int(np.count_nonzero(values)) for values in found)
    scale = counted / total if config.by != "none" and total else 1.0
    return [(values * scale).astype(np.float32) for values in found]


def _scores(group: Sequence[TrajectoryMeta]) -> np.ndarray:
    """Return the score of each trajectory in double precision, [G]."""
    return np.array([meta.score.value for meta in group], dtype=np.float64)


def _overlong(group: Sequence[TrajectoryMeta], config: RewardConfig, max_tokens: int) -> np.ndarray:
    """Return the penalty for length, [G]: 0 up to `overlong_tokens` before the limit, then proportional."""
    if not config.overlong_tokens:
        return np.zeros(len(group))
    lengths = np.array([meta.completion_tokens for meta in group], dtype=np.float64)
    over = (lengths - (max_tokens - config.overlong_tokens)) / config.overlong_tokens
    return config.overlong_penalty * np.clip(over, 0, 1)
