"""Advantages of whole batches of groups: pure numpy, one array [L] a sample, 0 on tokens that were not sampled. They are in
double precision, so that nothing is lost before the `advantages` stage has whitened and clipped them.

A trajectory is one sample or several, which follow one another: a turn each, or what a fork or a compaction left. Its tokens
here are those that were sampled, in that order; what the environment or a prompt said between them is passed over. Scores of
usable trajectories always have a value: a trajectory without a verdict never reaches a group.

An advantage of a whole trajectory is given to all its tokens. With `kl.place: reward` the stage has already subtracted the
divergence from the reference (`add_kl_rewards`), and `Sample.reward` includes all of it. The functions here use the
divergence of each token instead, beside `Sample.task_reward`: a token gets what follows from it on.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from antiphon.algorithms.config import AlgorithmConfig, KlConfig
from antiphon.algorithms.divergence import estimate_kl
from antiphon.algorithms.normalization import EPSILON, center, leave_one_out, normalize, standard_deviation
from antiphon.algorithms.returns import discounted_sums, generalized_advantages
from antiphon.core.errors import ConfigError
from antiphon.core.types import (
    KL_REWARD,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    TEACHER_LOGPROBS,
    VALUES,
    AttemptId,
    AttemptStatus,
    PolicyVersion,
    Sample,
    Sampling,
    Score,
    Segment,
    Streams,
    StreamSpec,
    TrajectoryMeta,
    Turn,
)

Samples = Sequence[Sequence[Sample]]  # [group][sample]
Arrays = list[list[np.ndarray]]  # [group][sample] -> [L]
Advantages = Callable[[Samples, AlgorithmConfig], Arrays]


def grpo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """(reward - group mean) / (group standard deviation + epsilon).

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2; deviation with Bessel's correction as in its public code.

    >>> np.stack(grpo(example([0, 1, 2]), AlgorithmConfig())[0]).round(2)  # each: a token of the prompt, one of its own
    array([[ 0., -1.],
           [ 0.,  0.],
           [ 0.,  1.]])
    """
    return _returns(groups, [normalize(task_rewards(group)) for group in groups], config)


def dr_grpo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """reward - group mean; use with `aggregation: sequence_mean_token_sum_norm`.

    Source: Liu et al. 2025, "Understanding R1-Zero-like training", section 3.2.

    >>> np.stack(dr_grpo(example([0, 4]), AlgorithmConfig())[0])
    array([[ 0., -2.],
           [ 0.,  2.]])
    """
    return _returns(groups, [center(task_rewards(group)) for group in groups], config)


def rloo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """reward - mean of the other rewards of the group.

    Source: Ahmadian et al. 2024, "Back to basics", section 3.3; Kool et al. 2019.

    >>> np.stack(rloo(example([0, 2, 4]), AlgorithmConfig())[0])  # the last: 4 - (0 + 2) / 2
    array([[ 0., -3.],
           [ 0.,  0.],
           [ 0.,  3.]])
    """
    return _returns(groups, [leave_one_out(task_rewards(group)) for group in groups], config)


def reinforce(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """The reward, discounted by `gamma` a token: no baseline, so groups of one do. Source: Williams 1992.

    >>> reinforce(example([4], tokens=3), AlgorithmConfig(gamma=0.5))[0][0]
    array([0., 1., 2., 4.])
    """
    return _returns(groups, [task_rewards(group) for group in groups], config)


def lite_ppo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """(reward - group mean) / (standard deviation of the batch + epsilon).

    Source: Liu et al. 2025, "Part I: Tricks or traps? A deep dive into RL for LLM reasoning".

    >>> np.stack(lite_ppo(example([0, 2], [5, 5]), AlgorithmConfig())[0]).round(2)  # -1, 1 and a deviation of √6
    array([[ 0.  , -0.41],
           [ 0.  ,  0.41]])
    """
    per_group = [task_rewards(group) for group in groups]
    divisor = standard_deviation(np.concatenate([*per_group, np.zeros(0)])) + EPSILON
    return _returns(groups, [center(values) / divisor for values in per_group], config)


def reinforce_plus_plus(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """The reward, whitened over all sampled tokens of the batch; groups of one do.

    Source: Hu 2025, "REINFORCE++"; its penalty for leaving the reference is `kl: {place: reward, estimator: k1}`.

    >>> np.concatenate(reinforce_plus_plus(example([1], [3]), AlgorithmConfig())).round(2)
    array([[ 0., -1.],
           [ 0.,  1.]])
    """
    return whiten(groups, reinforce(groups, config))


def reinforce_plus_plus_baseline(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """reward - group mean, whitened over all sampled tokens of the batch.

    Source: Hu 2025, "REINFORCE++", its variant with a baseline.

    >>> np.stack(reinforce_plus_plus_baseline(example([0, 2], [5, 5]), AlgorithmConfig())[0]).round(2)  # -1, 1, 0, 0 / √½
    array([[ 0.  , -1.41],
           [ 0.  ,  1.41]])
    """
    return whiten(groups, dr_grpo(groups, config))


def turn_reinforce(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """To each token, what its turn and those after it earned, discounted by `turn_gamma` a turn.

    Source: Wang et al. 2025, "ROLL", where it is called agentic REINFORCE.

    >>> turn_reinforce(example([5], tokens=2, paid=[2]), AlgorithmConfig(turn_gamma=0.5))[0][0]  # turns earn 2 and 3
    array([0. , 3.5, 3. ])
    """
    return _on_turns(groups, [[turn_returns(t, config.turn_gamma) for t in trajectories(g)] for g in groups], config)


def step_reinforce(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """As `turn_reinforce`, less the mean and divided by the deviation of all turns of the group.

    Source: Wang et al. 2025, "ROLL".

    >>> np.stack(step_reinforce(example([5, 1], tokens=2, paid=[2]), AlgorithmConfig())[0]).round(2)  # 5, 3 and 1, -1
    array([[ 0.  ,  1.16,  0.39],
           [ 0.  , -0.39, -1.16]])
    """
    found = []
    for group in groups:
        per_trajectory = [turn_returns(samples, config.turn_gamma) for samples in trajectories(group)]
        found.append(_cut(normalize(np.concatenate(per_trajectory)), per_trajectory))
    return _on_turns(groups, found, config)


def gigpo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """The advantage of the episode, as in `grpo`, and `step_weight` times that of the turn: what it and those after it earned,
    against the other turns of the group that began in the same state. A turn whose state nobody else saw has none.

    Source: Feng et al. 2025, "Group-in-group policy optimization".

    >>> found = gigpo(example([5, 1], tokens=2, paid=[2], states=["start", "end"]), AlgorithmConfig(step_weight=0.5))
    >>> np.stack(found[0]).round(2)  # episodes 5 and 1, turns 5 and 1, then 3 and -1: ±0.71 each, and half of that again
    array([[ 0.  ,  1.06,  1.06],
           [ 0.  , -1.06, -1.06]])
    """
    found = []
    for group in groups:
        members = trajectories(group)
        per_trajectory = [turn_returns(samples, config.turn_gamma) for samples in members]
        keys = [turn.state_key for samples in members for turn, tokens in _turns(samples) if tokens]
        steps = _among_equals(np.concatenate(per_trajectory), keys)
        episodes = normalize(task_rewards(group))
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

    >>> gae(example([1], tokens=2, values=[0.5, 0.6]), AlgorithmConfig(gae_lambda=0.5))[0][0]  # δ is 0.1, 0.4
    array([0. , 0.3, 0.4])
    """
    return _on_tokens(
        groups,
        lambda samples: generalized_advantages(
            token_rewards(samples), mean_values(samples), config.gamma, config.gae_lambda
        ),
    )


def zero(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """None: with teachers it is pure on-policy distillation.

    >>> zero(example([1]), AlgorithmConfig())[0][0]
    array([0., 0.])
    """
    return _returns(groups, [0 * task_rewards(group) for group in groups], config)


def add_teacher_advantages(groups: Samples, arrays: Arrays, coefficient: float) -> Arrays:
    """Advantages, and `coefficient` (log teacher - log policy) of each sampled token: a token is as good as its teachers think
    it more likely. The policy is that of before the step if it is known, else the one that sampled.

    Source: Agarwal et al. 2024, "On-policy distillation of language models"; one token at a time as in Lu et al. 2025,
    "On-policy distillation".
    """
    flat = [sample for group in groups for sample in group]
    if not flat:
        return arrays
    taught = coefficient * (_sampled(flat, [s.streams[TEACHER_LOGPROBS] for s in flat]) - _policy(flat))
    return _on_all(groups, flatten_sampled(groups, arrays) + taught)


def value_targets(groups: Samples, config: AlgorithmConfig, lambda_: float) -> Arrays:
    """What critics are to say of each sampled token: advantage and value together, with a λ of their own. With λ = 1 it is the
    discounted sum of the rewards that follow, whatever the values.

    >>> value_targets(example([1], tokens=2, values=[0.5, 0.6]), AlgorithmConfig(), 0.5)[0][0]  # 0.3 + 0.5, 0.4 + 0.6
    array([0. , 0.8, 1. ])
    """

    def target(samples: Sequence[Sample]) -> np.ndarray:
        values = mean_values(samples)
        return generalized_advantages(token_rewards(samples), values, config.gamma, lambda_) + values

    return _on_tokens(groups, target)


def example(
    *groups: Sequence[float],
    tokens: int = 1,
    paid: Sequence[float] = (),
    values: Sequence[float] = (),
    states: Sequence[str] = (),
) -> Samples:
    """Groups of trajectories with these rewards, to try an advantage by hand: a token of a prompt, then `tokens` that are
    sampled, each a turn. `paid`, `values` and `states` are what the first turns earned, were valued at, began in."""

    def first(given: Sequence[Any], place: int) -> Any:
        return given[place] if place < len(given) else None

    def sample(group: int, sibling: int, reward: float) -> Sample:
        version, blank = PolicyVersion(0, 0), np.zeros(tokens + 1, np.float32)
        turns = (
            Turn(
                start=i + 1,
                stop=i + 2,
                sampling=Sampling(max_tokens=1),
                reward=first(paid, i),
                state_key=first(states, i),
            )
            for i in range(tokens)
        )
        return Sample(
            meta=TrajectoryMeta(
                id=AttemptId(group, sibling, 0),
                prompt_id=str(group),
                task="",
                started=version,
                newest=version,
                status=AttemptStatus.FINISHED,
                score=Score.of(reward),
            ),
            segment=Segment(
                tokens=blank.astype(np.int32),
                loss_mask=np.arange(tokens + 1) > 0,
                logprobs=blank,
                versions=blank.astype(np.int32),
                turns=tuple(turns),
            ),
            streams=Streams(
                {StreamSpec(VALUES, "float64", (1,)): np.array([[0.0], *([value] for value in values)])}
                if values
                else {}
            ),
            advantages=blank,
            weights=blank + 1,
            reward=reward,
        )

    return [[sample(number, n, reward) for n, reward in enumerate(group)] for number, group in enumerate(groups)]


# --- pieces: of numbers --------------------------------------------------------------------------------------------------


def _among_equals(values: np.ndarray, keys: Sequence[object]) -> np.ndarray:
    """Each value normalised among those of the same key; 0 where there is no other, or no key."""
    found, members = np.zeros(len(values)), defaultdict(list)
    for index, key in enumerate(keys):
        if key is not None:
            members[key].append(index)
    for indices in members.values():
        found[indices] = normalize(values[indices])
    return found


# --- pieces: of trajectories ---------------------------------------------------------------------------------------------


def trajectories(group: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each trajectory of a group."""
    return [list(samples) for _, samples in groupby(group, key=lambda sample: sample.meta.id)]


def task_rewards(group: Sequence[Sample]) -> np.ndarray:
    """The reward of each trajectory before the divergence is taken off, [G]."""
    return np.array([_task_reward(samples) for samples in trajectories(group)], dtype=np.float64)


def _task_reward(samples: Sequence[Sample]) -> float:
    first = samples[0]
    return first.reward if first.task_reward is None else first.task_reward


def turn_rewards(samples: Sequence[Sample]) -> np.ndarray:
    """What each turn of a trajectory earned, [K]: what its grader or its environment says, divided as the reward was, and at
    the last turn what is then missing of it. `ConfigError` if turns have no share in what was done to the reward."""
    turns = _turns(samples)
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
    found[-1:] += _task_reward(samples) - found.sum()
    return found


def turn_returns(samples: Sequence[Sample], gamma: float) -> np.ndarray:
    """What each turn with sampled tokens of a trajectory and those after it earned, [K]. A turn without any has nothing to
    learn and is compared with no other; what it earned goes to those before it, or to the first that has tokens."""
    earned = turn_rewards(samples)
    sampled = np.flatnonzero([tokens for _, tokens in _turns(samples)])
    if len(sampled):
        earned[sampled[0]] += earned[: sampled[0]].sum()
    return discounted_sums(earned, gamma)[sampled]


def token_rewards(samples: Sequence[Sample]) -> np.ndarray:
    """What each sampled token of a trajectory earned, [T]: turns are paid at their last token, one without any at the token
    before it, or the first; and each token the divergence."""
    found = kl_rewards(samples)
    ends = np.cumsum([tokens for _, tokens in _turns(samples)])
    for end, reward in zip(ends, turn_rewards(samples), strict=True):
        found[max(end - 1, 0) :][:1] += reward
    return found


def _turns(samples: Sequence[Sample]) -> list[tuple[Turn, int]]:
    """The turns of a trajectory, and of each how many tokens of the loss it has."""
    return [
        (turn, int(sample.segment.loss_mask[turn.start : turn.stop].sum()))
        for sample in samples
        for turn in sample.segment.turns
    ]


def add_kl_rewards(groups: Samples, config: KlConfig) -> list[list[Sample]]:
    """Take the divergence from the reference off rewards: that of each token is its `KL_REWARD`, and that of a whole trajectory
    part of its `Sample.reward`; `Sample.task_reward` is the reward without it.

    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", section 2.
    """

    def paid(samples: Sequence[Sample]) -> Iterator[Sample]:
        earned = -config.coefficient * reference_divergence(samples, config)
        reward = samples[0].reward + float(earned.sum())
        for sample, array in zip(samples, _laid(samples, earned), strict=True):
            streams = sample.streams.with_stream(KL_REWARD, array)
            yield replace(sample, reward=reward, task_reward=sample.reward, streams=streams)

    return [[sample for samples in trajectories(group) for sample in paid(samples)] for group in groups]


def kl_rewards(samples: Sequence[Sample]) -> np.ndarray:
    """What the divergence adds to the reward of each sampled token of a trajectory, [T]; 0 where none is taken off."""
    return _sampled(samples, [s.streams.get(KL_REWARD, np.zeros(len(s.segment.tokens))) for s in samples])


def reference_divergence(samples: Sequence[Sample], config: KlConfig) -> np.ndarray:
    """Estimate at each sampled token of a trajectory, [T], for the policy before the step if that is known, else for the one
    that sampled."""
    return estimate_kl(
        _policy(samples), _sampled(samples, [s.streams[REFERENCE_LOGPROBS] for s in samples]), config.estimator, np
    )


def _policy(samples: Sequence[Sample]) -> np.ndarray:
    """Log-probs of the sampled tokens before the step if they are known, else those they were sampled with, [T]."""
    return _sampled(samples, [sample.streams.get(PROXIMAL_LOGPROBS, sample.segment.logprobs) for sample in samples])


def mean_values(samples: Sequence[Sample]) -> np.ndarray:
    """What the critics together say of the state in which each token of a trajectory was chosen, [T]."""
    return _sampled(samples, [sample.streams.named(VALUES).mean(axis=-1, dtype=np.float64) for sample in samples])


def whiten(groups: Samples, arrays: Arrays) -> Arrays:
    """Less their mean and divided by their deviation over all sampled tokens of the batch; the rest stays 0."""
    values = flatten_sampled(groups, arrays)
    return _on_all(groups, normalize(values, correction=0)) if len(values) else arrays


def select_lowest(groups: Samples, arrays: Arrays, share: float) -> list[list[np.ndarray]]:
    """Where a value is among the lowest `share` of those of all sampled tokens of the batch, [L] a sample. As many as fit the
    share; of equal ones those that come first."""
    values = flatten_sampled(groups, arrays)
    chosen = np.zeros(len(values), dtype=np.bool_)
    chosen[np.argsort(values, kind="stable")[: int(share * len(values))]] = True
    return _on_all(groups, chosen)


def flatten_sampled(groups: Samples, arrays: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """The sampled tokens' part of arrays [group][sample] -> [L], for the whole batch, in double precision."""
    flat = [sample for group in groups for sample in group]
    return _sampled(flat, [array for per_group in arrays for array in per_group]) if flat else np.zeros(0)


def _on_all(groups: Samples, values: np.ndarray) -> list[list[np.ndarray]]:
    """The reverse of `flatten_sampled`."""
    left = _laid([sample for group in groups for sample in group], values)
    return [[next(left) for _ in group] for group in groups]


def _returns(groups: Samples, values: Sequence[np.ndarray], config: AlgorithmConfig) -> Arrays:
    """The value of each trajectory, discounted from its end, on all its tokens; and the divergence that follows."""
    found = []
    for group, per_trajectory in zip(groups, values, strict=True):
        arrays: list[np.ndarray] = []
        for samples, value in zip(trajectories(group), per_trajectory, strict=True):
            if config.gamma == 1 and KL_REWARD not in samples[0].streams:  # the same on all tokens
                arrays += [np.where(s.segment.loss_mask, value, 0.0) for s in samples]
                continue
            earned = kl_rewards(samples)
            earned[-1:] += value
            arrays += _laid(samples, discounted_sums(earned, config.gamma))
        found.append(arrays)
    return found


def _on_turns(groups: Samples, values: Sequence[Sequence[np.ndarray]], config: AlgorithmConfig) -> Arrays:
    """The value of each turn with sampled tokens of each trajectory on these; and the divergence that follows."""
    per_trajectory = iter([value for per_group in values for value in per_group])

    def on_tokens(samples: Sequence[Sample]) -> np.ndarray:
        tokens = [tokens for _, tokens in _turns(samples) if tokens]
        return np.repeat(next(per_trajectory), tokens) + discounted_sums(kl_rewards(samples), config.gamma)

    return _on_tokens(groups, on_tokens)


def _on_tokens(groups: Samples, of: Callable[[Sequence[Sample]], np.ndarray]) -> Arrays:
    """What `of` makes of each trajectory, [T], laid on its samples."""
    return [[array for samples in trajectories(group) for array in _laid(samples, of(samples))] for group in groups]


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
