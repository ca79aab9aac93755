"""Regression targets of critics. Pure numpy."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from antiphon.algorithms.batch_arrays import flatten_sampled, unflatten_sampled, whiten
from antiphon.algorithms.trajectories import Arrays, Samples, gather_sampled, kl_rewards, list_turns, map_trajectories, mean_values, policy_logprobs, task_rewards, token_rewards, trajectories, turn_returns
from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.declarations import advantage
from antiphon.algorithms.normalization import EPSILON, center, leave_one_out, normalize, standard_deviation
from antiphon.algorithms.returns import discounted_sums, generalized_advantages
from antiphon.core.streams import (
    KL_REWARD,
    TEACHER_LOGPROBS,
    VALUES,
)
from antiphon.core.types import (
    Sample,
)
from antiphon.algorithms.trajectories import map_trajectories



def value_targets(groups: Samples, config: AlgorithmConfig, lambda_: float) -> Arrays:
    """What critics are to say of each sampled token: advantage and value together, with a λ of their own. With λ = 1 it is the
    discounted sum of the rewards that follow, whatever the values.

    >>> value_targets(example([1], tokens=2, values=[0.5, 0.6]), AlgorithmConfig(), 0.5)[0][0]  # 0.3 + 0.5, 0.4 + 0.6
    array([0. , 0.8, 1. ])
    """

    def target(samples: Sequence[Sample]) -> np.ndarray:
        values = mean_values(samples)
        return generalized_advantages(token_rewards(samples), values, config.gamma, lambda_) + values

    return map_trajectories(groups, target)


