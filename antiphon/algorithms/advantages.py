"""Advantages of whole batches of groups: pure numpy, one array [L] a sample, 0 on tokens that were not sampled.

A trajectory is one sample or several, which follow one another: a turn each, or what a fork or a compaction left. Its tokens
here are those that were sampled, in that order; what the environment or a prompt said between them is passed over. Scores of
usable trajectories always have a value: a trajectory without a verdict never reaches a group.

An advantage of a whole trajectory is given to all its tokens. Beside it, each token has what follows from it on of the
penalty for leaving the reference, where that is `kl.place: reward`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np

from antiphon.algorithms.config import AlgorithmConfig, KlConfig
from antiphon.algorithms.divergence import divergence
from antiphon.algorithms.rewards import EPSILON
from antiphon.types import PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS, TEACHER_LOGPROBS, VALUES, FloatArray, Sample

Samples = Sequence[Sequence[Sample]]  # [group][sample]
Arrays = list[list[FloatArray]]  # [group][sample] -> [L]
Advantages = Callable[[Samples, AlgorithmConfig], Arrays]


def grpo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """(reward - group mean) / (group standard deviation + epsilon).

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2; deviation with Bessel's correction as in its public code.
    """
    return _returns(groups, [normalised(rewards(group)) for group in groups], config)


def dr_grpo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """reward - group mean; use with `aggregation: sequence_mean_token_sum_norm`.

    Source: Liu et al. 2025, "Understanding R1-Zero-like training", section 3.2.
    """
    return _returns(groups, [centred(rewards(group)) for group in groups], config)


def rloo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """reward - mean of the other rewards of the group.

    Source: Ahmadian et al. 2024, "Back to basics", section 3.3; Kool et al. 2019.
    """
    return _returns(groups, [left_out(rewards(group)) for group in groups], config)


def reinforce(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """The reward, discounted by `gamma` a token: no baseline, so groups of one do. Source: Williams 1992."""
    return _returns(groups, [rewards(group) for group in groups], config)


def lite_ppo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """(reward - group mean) / (standard deviation of the batch + epsilon).

    Source: Liu et al. 2025, "Part I: Tricks or traps? A deep dive into RL for LLM reasoning".
    """
    per_group = [rewards(group) for group in groups]
    deviation = np.concatenate(per_group).std(ddof=1) if per_group else 0.0
    return _returns(groups, [centred(r) / (deviation + EPSILON) for r in per_group], config)


def reinforce_plus_plus(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """The reward, whitened over all sampled tokens of the batch; groups of one do.

    Source: Hu 2025, "REINFORCE++"; its penalty for leaving the reference is `kl: {place: reward, estimator: k1}`.
    """
    return whitened(groups, reinforce(groups, config))


def reinforce_plus_plus_baseline(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """reward - group mean, whitened over all sampled tokens of the batch.

    Source: Hu 2025, "REINFORCE++", its variant with a baseline.
    """
    return whitened(groups, dr_grpo(groups, config))


def turn_reinforce(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """To each token, what its turn and those after it earned, discounted by `turn_gamma` a turn.

    Source: Wang et al. 2025, "ROLL", where it is called agentic REINFORCE.
    """
    return _on_turns(groups, [[turn_returns(t, config.turn_gamma) for t in trajectories(g)] for g in groups], config)


def step_reinforce(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """As `turn_reinforce`, less the mean and divided by the deviation of all turns of the group.

    Source: Wang et al. 2025, "ROLL".
    """
    found = []
    for group in groups:
        per_trajectory = [turn_returns(samples, config.turn_gamma) for samples in trajectories(group)]
        found.append(_cut(normalised(np.concatenate(per_trajectory)), per_trajectory))
    return _on_turns(groups, found, config)


def gigpo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """The advantage of the episode, as in `grpo`, and `step_weight` times that of the turn: what it and those after it earned,
    against the other turns of the group that began in the same state. A turn whose state nobody else saw has none.

    Source: Feng et al. 2025, "Group-in-group policy optimization".
    """
    found = []
    for group in groups:
        members = trajectories(group)
        per_trajectory = [turn_returns(samples, config.turn_gamma) for samples in members]
        keys = [turn.state_key for samples in members for sample in samples for turn in sample.segment.turns]
        steps = _among_equals(np.concatenate(per_trajectory), keys)
        episodes = normalised(rewards(group))
        found.append(
            [
                episode + config.step_weight * step
                for episode, step in zip(episodes, _cut(steps, per_trajectory), strict=True)
            ]
        )
    return _on_turns(groups, found, config)


def gae(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """Σ (gamma · `gae_lambda`)^k δ_{t+k}, δ_t = r_t + gamma V_{t+1} - V_t over the sampled tokens of the trajectory, where V is
    the mean of the critics, and 0 after the last token. Turns are paid at their end.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", eq. 16; the
    mean as in Liu et al. 2025, "Asymmetric proximal policy optimization".
    """
    return _on_tokens(
        groups,
        lambda samples: generalised(
            token_rewards(samples, config), mean_values(samples), config.gamma, config.gae_lambda
        ),
    )


def nothing(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """None: with teachers it is pure on-policy distillation."""
    return _returns(groups, [0 * rewards(group) for group in groups], config)


def with_teachers(groups: Samples, arrays: Arrays, coefficient: float) -> Arrays:
    """Advantages, and `coefficient` (log teacher - log policy) of each sampled token: a token is as good as its teachers think
    it more likely. The policy is that of before the step if it is known, else the one that sampled.

    Source: Agarwal et al. 2024, "On-policy distillation of language models"; one token at a time as in Lu et al. 2025,
    "On-policy distillation".
    """
    flat = [sample for group in groups for sample in group]
    if not flat:
        return arrays
    taught = coefficient * (_sampled(flat, [s.streams[TEACHER_LOGPROBS] for s in flat]) - _policy(flat))
    return _on_all(groups, (of_all(groups, arrays) + taught).astype(np.float32))


def value_targets(groups: Samples, config: AlgorithmConfig, lambda_: float) -> Arrays:
    """What critics are to say of each sampled token: advantage and value together, with a λ of their own. With λ = 1 it is the
    discounted sum of the rewards that follow, whatever the values."""

    def target(samples: Sequence[Sample]) -> FloatArray:
        values = mean_values(samples)
        return generalised(token_rewards(samples, config), values, config.gamma, lambda_) + values

    return _on_tokens(groups, target)


# --- pieces: of numbers --------------------------------------------------------------------------------------------------


def centred(values: FloatArray) -> FloatArray:
    """Values [G] less their mean.

    >>> centred(np.float32([0, 1, 2]))
    array([-1.,  0.,  1.], dtype=float32)
    """
    found: FloatArray = values - values.mean() if len(values) else values
    return found


def normalised(values: FloatArray) -> FloatArray:
    """Values [G] less their mean, divided by their deviation and epsilon; 0 for one alone.

    >>> normalised(np.float32([0, 1, 2])).round(3)
    array([-1.,  0.,  1.], dtype=float32)
    """
    found: FloatArray = centred(values) / (values.std(ddof=1) + EPSILON) if len(values) > 1 else 0 * values
    return found


def left_out(values: FloatArray) -> FloatArray:
    """Values [G], each less the mean of the others.

    >>> left_out(np.float32([0, 1, 2]))
    array([-1.5,  0. ,  1.5], dtype=float32)
    """
    count = len(values)
    found: FloatArray = centred(values) * np.float32(count / (count - 1))
    return found


def discounted(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Σ_{k≥t} gamma^(k-t) r_k of each t, [T] in double precision; in log T passes over the array.

    >>> discounted(np.array([1.0, 0.0, 4.0]), 0.5)
    array([2., 2., 4.])
    """
    found = rewards.astype(np.float64)
    if gamma == 1:
        return found[::-1].cumsum()[::-1]
    reach = 1
    while reach < len(found) and gamma**reach > 0:
        found[:-reach] += gamma**reach * found[reach:]
        reach *= 2
    return found


def generalised(rewards: np.ndarray, values: np.ndarray, gamma: float, lambda_: float) -> np.ndarray:
    """Generalised advantages [T] of rewards [T] and the values [T] of the states in which the tokens were chosen.

    >>> generalised(np.array([0.0, 1.0]), np.array([0.5, 0.6]), 1.0, 0.5)  # δ = 0.1, 0.4
    array([0.3, 0.4])
    """
    after = np.append(values[1:], 0.0) if len(values) else values
    return discounted(rewards + gamma * after - values, gamma * lambda_)


def _among_equals(values: np.ndarray, keys: Sequence[object]) -> np.ndarray:
    """Each value normalised among those of the same key; 0 where there is no other, or no key."""
    found, members = np.zeros(len(values)), defaultdict(list)
    for index, key in enumerate(keys):
        if key is not None:
            members[key].append(index)
    for indices in members.values():
        found[indices] = normalised(values[indices])
    return found


# --- pieces: of trajectories ---------------------------------------------------------------------------------------------


def trajectories(group: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each trajectory of a group."""
    return [list(samples) for _, samples in groupby(group, key=lambda sample: sample.meta.id)]


def rewards(group: Sequence[Sample]) -> FloatArray:
    """The reward of each trajectory, [G]."""
    return np.array([samples[0].reward for samples in trajectories(group)], dtype=np.float32)


def turn_rewards(samples: Sequence[Sample]) -> np.ndarray:
    """What each turn of a trajectory earned, [K]: what its grader or its environment says, and at the last turn what is then
    missing of its reward."""
    turns = [turn for sample in samples for turn in sample.segment.turns]
    graded = samples[0].meta.score.turns
    if len(graded) != len(turns):
        graded = tuple(turn.reward or 0.0 for turn in turns)
    found = np.array(graded, dtype=np.float64)
    found[-1:] += samples[0].reward - found.sum()
    return found


def turn_returns(samples: Sequence[Sample], gamma: float) -> np.ndarray:
    """What each turn of a trajectory and those after it earned, [K]."""
    return discounted(turn_rewards(samples), gamma)


def token_rewards(samples: Sequence[Sample], config: AlgorithmConfig) -> np.ndarray:
    """What each sampled token of a trajectory earned, [T]: turns are paid at their last token; less the penalty."""
    found = penalties(samples, config.kl)
    ends = np.cumsum(
        [sample.segment.loss_mask[t.start : t.stop].sum() for sample in samples for t in sample.segment.turns]
    )
    for end, reward in zip(ends, turn_rewards(samples), strict=True):
        found[max(int(end) - 1, 0) : int(end)] += reward
    return found


def penalties(samples: Sequence[Sample], config: KlConfig) -> np.ndarray:
    """What leaving the reference takes off the reward of each sampled token of a trajectory, [T]."""
    if not config.in_reward:
        return np.zeros(sum(int(sample.segment.loss_mask.sum()) for sample in samples))
    return -config.coefficient * reference_divergence(samples, config)


def reference_divergence(samples: Sequence[Sample], config: KlConfig) -> np.ndarray:
    """Estimate at each sampled token of a trajectory, [T], for the policy before the step if that is known, else for the one
    that sampled."""
    return divergence(
        _policy(samples), _sampled(samples, [s.streams[REFERENCE_LOGPROBS] for s in samples]), config.estimator, np
    )


def _policy(samples: Sequence[Sample]) -> np.ndarray:
    """Log-probs of the sampled tokens before the step if they are known, else those they were sampled with, [T]."""
    return _sampled(samples, [sample.streams.get(PROXIMAL_LOGPROBS, sample.segment.logprobs) for sample in samples])


def mean_values(samples: Sequence[Sample]) -> np.ndarray:
    """What the critics together say of the state in which each token of a trajectory was chosen, [T]."""
    return _sampled(samples, [sample.streams.named(VALUES).mean(axis=-1) for sample in samples])


def whitened(groups: Samples, arrays: Arrays) -> Arrays:
    """Less their mean and divided by their deviation over all sampled tokens of the batch; the rest stays 0."""
    values = of_all(groups, arrays)
    if not len(values):
        return arrays
    return _on_all(groups, ((values - values.mean()) / (values.std() + EPSILON)).astype(np.float32))


def lowest(groups: Samples, arrays: Arrays, share: float) -> list[list[np.ndarray]]:
    """Where a value is among the lowest `share` of those of all sampled tokens of the batch, [L] a sample. As many as fit the
    share; of equal ones those that come first."""
    values = of_all(groups, arrays)
    chosen = np.zeros(len(values), dtype=np.bool_)
    chosen[np.argsort(values, kind="stable")[: int(share * len(values))]] = True
    return _on_all(groups, chosen)


def of_all(groups: Samples, arrays: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """The sampled tokens' part of arrays [group][sample] -> [L], for the whole batch, in double precision."""
    flat = [sample for group in groups for sample in group]
    return _sampled(flat, [array for per_group in arrays for array in per_group]) if flat else np.zeros(0)


def _on_all(groups: Samples, values: np.ndarray) -> list[list[np.ndarray]]:
    """The reverse of `of_all`."""
    left = _laid([sample for group in groups for sample in group], values)
    return [[next(left) for _ in group] for group in groups]


def _returns(groups: Samples, values: Sequence[FloatArray], config: AlgorithmConfig) -> Arrays:
    """The value of each trajectory, discounted from its end, on all its tokens; and the penalties that follow."""
    found = []
    for group, per_trajectory in zip(groups, values, strict=True):
        arrays: list[FloatArray] = []
        for samples, value in zip(trajectories(group), per_trajectory, strict=True):
            if config.gamma == 1 and not config.kl.in_reward:  # the same on all tokens
                arrays += [np.where(s.segment.loss_mask, np.float32(value), np.float32(0)) for s in samples]
                continue
            earned = penalties(samples, config.kl)
            earned[-1:] += value
            arrays += _laid(samples, discounted(earned, config.gamma).astype(np.float32))
        found.append(arrays)
    return found


def _on_turns(groups: Samples, values: Sequence[Sequence[np.ndarray]], config: AlgorithmConfig) -> Arrays:
    """The value of each turn of each trajectory on its tokens; and the penalties that follow."""
    per_trajectory = iter([value for per_group in values for value in per_group])

    def on_tokens(samples: Sequence[Sample]) -> np.ndarray:
        turns = [sample.segment.loss_mask[t.start : t.stop].sum() for sample in samples for t in sample.segment.turns]
        return np.repeat(next(per_trajectory), turns) + discounted(penalties(samples, config.kl), config.gamma)

    return _on_tokens(groups, on_tokens)


def _on_tokens(groups: Samples, of: Callable[[Sequence[Sample]], np.ndarray]) -> Arrays:
    """What `of` makes of each trajectory, [T], laid on its samples."""
    return [
        [array for samples in trajectories(group) for array in _laid(samples, of(samples).astype(np.float32))]
        for group in groups
    ]


def _sampled(samples: Sequence[Sample], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The sampled tokens' part of arrays [L], [T] in double precision."""
    parts = [array[sample.segment.loss_mask] for sample, array in zip(samples, arrays, strict=True)]
    return np.concatenate(parts).astype(np.float64)


def _laid(samples: Sequence[Sample], values: np.ndarray) -> Iterator[np.ndarray]:
    """Values [T] of the sampled tokens, laid on the samples, [L] each; 0 elsewhere."""
    start = 0
    for sample in samples:
        stop = start + int(sample.segment.loss_mask.sum())
        found = np.zeros(len(sample.segment.tokens), dtype=values.dtype)
        found[sample.segment.loss_mask] = values[start:stop]
        yield found
        start = stop


def _cut(values: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    return np.split(values, np.cumsum([len(part) for part in like])[:-1])
