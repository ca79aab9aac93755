"""Advantages of turns, for agents. Pure numpy; conventions as in `advantages`."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.declarations import advantage
from antiphon.algorithms.normalization import normalize
from antiphon.algorithms.returns import discounted_sums
from antiphon.algorithms.trajectories import (
    Arrays,
    Samples,
    kl_rewards,
    list_turns,
    map_trajectories,
    task_rewards,
    trajectories,
    turn_returns,
)
from antiphon.core.types import (
    Sample,
)


@advantage(per_turn=True)
def turn_reinforce(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """To each token, what its turn and those after it earned, discounted by `turn_gamma` a turn.

    Source: Wang et al. 2025, "ROLL", where it is called agentic REINFORCE.

    >>> turn_reinforce(example([5], tokens=2, paid=[2]), AlgorithmConfig(turn_gamma=0.5))[0][0]  # turns earn 2 and 3
    array([0. , 3.5, 3. ])
    """
    return _spread_over_turns(
        groups, [[turn_returns(t, config.turn_gamma) for t in trajectories(g)] for g in groups], config
    )


@advantage(grouped=True, per_turn=True)
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
        found.append(_split_like(normalize(np.concatenate(per_trajectory)), per_trajectory))
    return _spread_over_turns(groups, found, config)


@advantage(grouped=True, per_turn=True)
def gigpo(groups: Samples, config: AlgorithmConfig) -> Arrays:
    """The advantage of the episode, as in `grpo`, plus `step_weight` times the advantage of the turn.

    A turn is compared, by what it and those after it earned, with the other turns of the group that began in the same state. A
    turn whose state no other turn saw has none.

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
        keys = [turn.state_key for samples in members for turn, tokens in list_turns(samples) if tokens]
        steps = _normalize_within_states(np.concatenate(per_trajectory), keys)
        episodes = normalize(task_rewards(group))
        found.append(
            [
                episode + config.step_weight * step
                for episode, step in zip(episodes, _split_like(steps, per_trajectory), strict=True)
            ]
        )
    return _spread_over_turns(groups, found, config)


def _normalize_within_states(values: np.ndarray, keys: Sequence[object]) -> np.ndarray:
    """Each value normalised among those of the same key; 0 where there is no other, or no key."""
    found, members = np.zeros(len(values)), defaultdict(list)
    for index, key in enumerate(keys):
        if key is not None:
            members[key].append(index)
    for indices in members.values():
        found[indices] = normalize(values[indices])
    return found


def _spread_over_turns(groups: Samples, values: Sequence[Sequence[np.ndarray]], config: AlgorithmConfig) -> Arrays:
    """The value of each turn with sampled tokens of each trajectory on these; and the divergence that follows."""
    per_trajectory = iter([value for per_group in values for value in per_group])

    def on_tokens(samples: Sequence[Sample]) -> np.ndarray:
        tokens = [tokens for _, tokens in list_turns(samples) if tokens]
        return np.repeat(next(per_trajectory), tokens) + discounted_sums(kl_rewards(samples), config.gamma)

    return map_trajectories(groups, on_tokens)


def _split_like(values: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    return np.split(values, np.cumsum([len(part) for part in like])[:-1])
