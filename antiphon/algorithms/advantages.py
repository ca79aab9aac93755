"""Advantages of whole batches of groups: pure numpy, one array [L] a sample, 0 on tokens that were not sampled.

They are in double precision, so that nothing is lost before the `advantages` stage has whitened and clipped them.

A trajectory is one sample or several, which follow one another: a turn each, or what a fork left. Its tokens
here are those that were sampled, in that order; what the environment or a prompt said between them is passed over. Scores of
usable trajectories always have a value: a trajectory without a verdict never reaches a group.

An advantage of a whole trajectory is given to all its tokens. With `kl.place: reward` the stage has already subtracted the
KL penalty from the rewards (`subtract_kl`), and `Sample.reward` includes all of it. The functions here use the
penalty of each token instead, beside `Sample.task_reward`: a token gets the sum of the penalties from it on.
"""

from collections.abc import Callable, Sequence

import numpy as np

from antiphon.algorithms.batch_arrays import whiten
from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.declarations import advantage
from antiphon.algorithms.normalization import EPSILON, center, leave_one_out, normalize, standard_deviation
from antiphon.algorithms.returns import discounted_sums, generalized_advantages
from antiphon.algorithms.trajectories import (
    Arrays,
    Samples,
    kl_rewards,
    map_rewards,
    scatter_sampled,
    task_rewards,
    trajectories,
)
from antiphon.core.types import (
    KL_REWARD,
    VALUES,
)

Advantages = Callable[[Samples, AlgorithmConfig], Arrays]


@advantage(grouped=True)
def grpo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """(reward - group mean) / (group standard deviation + epsilon).

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2; deviation with Bessel's correction as in its public code.

    >>> np.stack(grpo(example([0, 1, 2]), AlgorithmConfig())[0]).round(2)  # columns: a prompt token, a sampled token
    array([[ 0., -1.],
           [ 0.,  0.],
           [ 0.,  1.]])
    """
    return _spread_over_trajectories(groups, [normalize(task_rewards(group)) for group in groups], config)


@advantage(grouped=True)
def dr_grpo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """Reward - group mean; use with `aggregation: sequence_mean_token_sum_norm`.

    Source: Liu et al. 2025, "Understanding R1-Zero-like training", section 3.2.

    >>> np.stack(dr_grpo(example([0, 4]), AlgorithmConfig())[0])
    array([[ 0., -2.],
           [ 0.,  2.]])
    """
    return _spread_over_trajectories(groups, [center(task_rewards(group)) for group in groups], config)


@advantage(grouped=True)
def rloo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """Reward - mean of the other rewards of the group.

    Source: Ahmadian et al. 2024, "Back to basics", section 3.3; Kool et al. 2019.

    >>> np.stack(rloo(example([0, 2, 4]), AlgorithmConfig())[0])  # the last: 4 - (0 + 2) / 2
    array([[ 0., -3.],
           [ 0.,  0.],
           [ 0.,  3.]])
    """
    return _spread_over_trajectories(groups, [leave_one_out(task_rewards(group)) for group in groups], config)


@advantage()
def reinforce(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """The reward, discounted by `gamma` a token: no baseline, so groups of one do. Source: Williams 1992.

    >>> reinforce(example([4], tokens=3), AlgorithmConfig(gamma=0.5))[0][0]
    array([0., 1., 2., 4.])
    """
    return _spread_over_trajectories(groups, [task_rewards(group) for group in groups], config)


@advantage(grouped=True)
def lite_ppo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """(reward - group mean) / (standard deviation of the batch + epsilon).

    Source: Liu et al. 2025, "Part I: Tricks or traps? A deep dive into RL for LLM reasoning".

    >>> np.stack(lite_ppo(example([0, 2], [5, 5]), AlgorithmConfig())[0]).round(2)  # -1, 1 and a deviation of √6
    array([[ 0.  , -0.41],
           [ 0.  ,  0.41]])
    """
    per_group = [task_rewards(group) for group in groups]
    divisor = standard_deviation(np.concatenate([*per_group, np.zeros(0)])) + EPSILON
    return _spread_over_trajectories(groups, [center(values) / divisor for values in per_group], config)


@advantage()
def reinforce_plus_plus(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """The reward, whitened over all sampled tokens of the batch; groups of one do.

    Source: Hu 2025, "REINFORCE++"; its penalty for leaving the reference is `kl: {place: reward, estimator: k1}`.

    >>> np.concatenate(reinforce_plus_plus(example([1], [3]), AlgorithmConfig())).round(2)
    array([[ 0., -1.],
           [ 0.,  1.]])
    """
    return whiten(groups, reinforce(groups, config))


@advantage(grouped=True)
def reinforce_plus_plus_baseline(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """Reward - group mean, whitened over all sampled tokens of the batch.

    Source: Hu 2025, "REINFORCE++", its variant with a baseline.

    >>> np.stack(reinforce_plus_plus_baseline(example([0, 2], [5, 5]), AlgorithmConfig())[0]).round(2)  # -1, 1, 0, 0 / √½
    array([[ 0.  , -1.41],
           [ 0.  ,  1.41]])
    """
    return whiten(groups, dr_grpo(groups, config))


@advantage(needs=[VALUES], pays_turns=True)
def gae(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """Generalised advantage estimation over the sampled tokens of a trajectory.

    Σ (gamma · `gae_lambda`)^k δ_{t+k}, δ_t = r_t + gamma V_{t+1} - V_t, where V is the mean of the critics, and 0 after the
    last token. Turns are paid at their end. `reward.whiten` rescales r.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", eq. 16; the
    mean as in Liu et al. 2025, "Asymmetric proximal policy optimization".

    >>> gae(example([1], tokens=2, values=[0.5, 0.6]), AlgorithmConfig(gae_lambda=0.5))[0][0]  # δ is 0.1, 0.4
    array([0. , 0.3, 0.4])
    """
    return map_rewards(
        groups,
        config.reward.whiten,
        lambda rewards, values: generalized_advantages(rewards, values, config.gamma, config.gae_lambda),
    )


@advantage()
def zero(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """None: with teachers it is pure on-policy distillation.

    >>> zero(example([1]), AlgorithmConfig())[0][0]
    array([0., 0.])
    """
    return _spread_over_trajectories(groups, [0 * task_rewards(group) for group in groups], config)


# --- pieces: of numbers --------------------------------------------------------------------------------------------------


# --- pieces: of trajectories ---------------------------------------------------------------------------------------------


def _spread_over_trajectories(groups: Samples, values: Sequence[np.ndarray], config: AlgorithmConfig) -> Arrays:
    """Return for each sampled token its trajectory's value plus the KL penalties from the token on, discounted."""
    found = []
    for group, per_trajectory in zip(groups, values, strict=True):
        arrays: list[np.ndarray] = []
        for samples, value in zip(trajectories(group), per_trajectory, strict=True):
            if config.gamma == 1 and KL_REWARD not in samples[0].streams:  # the same value on all tokens
                arrays += [np.where(s.segment.loss_mask, value, 0.0) for s in samples]
                continue
            earned = kl_rewards(samples)
            earned[-1:] += value
            arrays += scatter_sampled(samples, discounted_sums(earned, config.gamma))
        found.append(arrays)
    return found
