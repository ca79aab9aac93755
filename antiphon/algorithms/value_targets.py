"""Regression targets of critics. Pure numpy."""

from collections.abc import Sequence

import numpy as np

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.returns import generalized_advantages
from antiphon.algorithms.trajectories import Arrays, Samples, map_trajectories, mean_values, token_rewards
from antiphon.core.types import (
    Sample,
)


def value_targets(groups: Samples, config: AlgorithmConfig, lambda_: float) -> Arrays:
    """Return the regression targets of critics for each sampled token: advantage plus value, with a λ of their own.

    With λ = 1 they are the discounted sums of the rewards that follow, whatever the values.

    >>> value_targets(example([1], tokens=2, values=[0.5, 0.6]), AlgorithmConfig(), 0.5)[0][0]  # 0.3 + 0.5, 0.4 + 0.6
    array([0. , 0.8, 1. ])
    """

    def target(samples: Sequence[Sample]) -> np.ndarray:
        values = mean_values(samples)
        return generalized_advantages(token_rewards(samples), values, config.gamma, lambda_) + values

    return map_trajectories(groups, target)
