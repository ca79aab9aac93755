"""Regression targets of critics. Pure numpy."""

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.returns import generalized_advantages
from antiphon.algorithms.trajectories import Arrays, Samples, map_rewards


def value_targets(groups: Samples, config: AlgorithmConfig, lambda_: float) -> Arrays:
    """Return the regression targets of critics for each sampled token: advantage plus value, with a λ of their own.

    With λ = 1 they are the discounted sums of the rewards that follow, whatever the values.

    >>> value_targets(example([1], tokens=2, values=[0.5, 0.6]), AlgorithmConfig(), 0.5)[0][0]  # 0.3 + 0.5, 0.4 + 0.6
    array([0. , 0.8, 1. ])
    """
    return map_rewards(
        groups,
        config.reward.whiten,
        lambda rewards, values: generalized_advantages(rewards, values, config.gamma, lambda_) + values,
    )
