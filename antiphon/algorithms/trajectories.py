"""Rewards of trajectories, of their turns and of their tokens. Pure numpy.

A trajectory is one sample or several that follow one another: one for each turn, or what a fork left. Its
tokens here are those that were sampled, in order; what prompts and environments said between them is skipped.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np

from antiphon.algorithms.normalization import rescale
from antiphon.algorithms.returns import discounted_sums
from antiphon.core.errors import ConfigError
from antiphon.core.types import (
    KL_REWARD,
    PROXIMAL_LOGPROBS,
    VALUES,
    Sample,
    Turn,
)

Samples = Sequence[Sequence[Sample]]  # [group][sample]


Arrays = list[list[np.ndarray]]  # [group][sample] -> [L]


def trajectories(group: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each trajectory of a group."""
    return [list(samples) for _, samples in groupby(group, key=lambda sample: sample.meta.id)]


def task_rewards(group: Sequence[Sample]) -> np.ndarray:
    """Return the reward of each trajectory without the KL penalty, [G]."""
    return np.array([task_reward_of(samples) for samples in trajectories(group)], dtype=np.float64)


def task_reward_of(samples: Sequence[Sample]) -> float:
    """Return the reward of one trajectory without the KL penalty."""
    first = samples[0]
    return first.reward if first.task_reward is None else first.task_reward


def turn_rewards(samples: Sequence[Sample]) -> np.ndarray:
    """Return the reward of each turn of a trajectory, [K].

    It is what its grader or its environment says, divided as the reward was; the last turn gets what is then missing of the
    trajectory's reward.

    Raises:
        ConfigError: Turns have rewards of their own, and no share in what was done to the reward.
    """
    turns = list_turns(samples)
    graded = samples[0].meta.score.turns
    if len(graded) != len(turns):
        graded = tuple(turn.reward or 0.0 for turn, _ in turns)
    divisor = samples[0].turn_divisor
    if divisor is None and any(graded[:-1]):
        raise ConfigError(
            "algorithm.reward.baseline and algorithm.reward.clip change the reward of a whole trajectory, of which no turn has "
            f"a share, and turns of {samples[0].meta.id} are paid on their own (algorithm.advantage): leave them out, or "
            "use an advantage of whole trajectories; algorithm.reward.scale divides turns, too"
        )
    found = np.array(graded, dtype=np.float64) / divisor if divisor else np.zeros(len(turns))
    found[-1:] += task_reward_of(samples) - found.sum()
    return found


def turn_returns(samples: Sequence[Sample], gamma: float) -> np.ndarray:
    """Return the discounted return of each turn with sampled tokens, [K].

    A turn without any has nothing to learn and is compared with no other; its reward goes to the turns before it, or to the
    first that has tokens.
    """
    earned = turn_rewards(samples)
    sampled = np.flatnonzero([tokens for _, tokens in list_turns(samples)])
    if len(sampled):
        earned[sampled[0]] += earned[: sampled[0]].sum()
    return discounted_sums(earned, gamma)[sampled]


def token_rewards(samples: Sequence[Sample]) -> np.ndarray:
    """Return the reward of each sampled token of a trajectory, [T], with the KL penalty.

    A turn is paid at its last token; one without tokens at the token before it, or at the first.
    """
    found = kl_rewards(samples)
    ends = np.cumsum([tokens for _, tokens in list_turns(samples)])
    for end, reward in zip(ends, turn_rewards(samples), strict=True):
        found[max(end - 1, 0) :][:1] += reward
    return found


def list_turns(samples: Sequence[Sample]) -> list[tuple[Turn, int]]:
    """Return the turns of a trajectory, each with its number of loss tokens."""
    return [
        (turn, int(sample.segment.loss_mask[turn.start : turn.stop].sum()))
        for sample in samples
        for turn in sample.segment.turns
    ]


def kl_rewards(samples: Sequence[Sample]) -> np.ndarray:
    """Return the KL penalty in the reward of each sampled token of a trajectory, [T]; 0 where there is none."""
    return gather_sampled(samples, [s.streams.get(KL_REWARD, np.zeros(len(s.segment.tokens))) for s in samples])


def policy_logprobs(samples: Sequence[Sample]) -> np.ndarray:
    """Return the log-probs of the sampled tokens before the step if they are known, else those of sampling, [T]."""
    return gather_sampled(
        samples, [sample.streams.get(PROXIMAL_LOGPROBS, sample.segment.logprobs) for sample in samples]
    )


def mean_values(samples: Sequence[Sample]) -> np.ndarray:
    """Return the mean of the critics' values of the state in which each token of a trajectory was chosen, [T]."""
    return gather_sampled(samples, [sample.streams[VALUES].mean(axis=-1, dtype=np.float64) for sample in samples])


def gather_sampled(samples: Sequence[Sample], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the values of the sampled tokens, from arrays [L] of samples, in double precision, [T]."""
    parts = [array[sample.segment.loss_mask] for sample, array in zip(samples, arrays, strict=True)]
    return np.concatenate(parts).astype(np.float64)


def scatter_sampled(samples: Sequence[Sample], values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield values [T] of the sampled tokens as arrays [L], one for each sample; 0 elsewhere."""
    start = 0
    for sample in samples:
        stop = start + int(sample.segment.loss_mask.sum())
        found = np.zeros(len(sample.segment.tokens), dtype=values.dtype)
        found[sample.segment.loss_mask] = values[start:stop]
        yield found
        start = stop


def map_rewards(groups: Samples, whiten: bool, of: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Arrays:
    """Apply a function of the rewards and the values of the tokens, both [T], to each trajectory; see `map_trajectories`.

    Args:
        groups: The batch.
        whiten: Rescale rewards over the batch, as `reward.whiten` says.
        of: The function.
    """
    rewards = [token_rewards(samples) for group in groups for samples in trajectories(group)]
    if whiten and rewards:
        rewards = np.split(rescale(np.concatenate(rewards)), np.cumsum([len(each) for each in rewards])[:-1])
    left = iter(rewards)
    return map_trajectories(groups, lambda samples: of(next(left), mean_values(samples)))


def map_trajectories(groups: Samples, of: Callable[[Sequence[Sample]], np.ndarray]) -> Arrays:
    """Apply a function to each trajectory; scatter its result [T] onto the samples."""
    return [
        [array for samples in trajectories(group) for array in scatter_sampled(samples, of(samples))]
        for group in groups
    ]
