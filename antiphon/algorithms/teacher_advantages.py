"""Advantages from teachers: on-policy distillation. Pure numpy."""

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
from antiphon.algorithms.value_targets import value_targets



def add_teacher_advantages(groups: Samples, arrays: Arrays, coefficient: float) -> Arrays:
    """Advantages, and `coefficient` (log teacher - log policy) of each sampled token: a token is as good as its teachers think
    it more likely. The policy is that of before the step if it is known, else the one that sampled.

    Source: Agarwal et al. 2024, "On-policy distillation of language models"; one token at a time as in Lu et al. 2025,
    "On-policy distillation".
    """
    flat = [sample for group in groups for sample in group]
    if not flat:
        return arrays
    taught = coefficient * (gather_sampled(flat, [s.streams[TEACHER_LOGPROBS] for s in flat]) - policy_logprobs(flat))
    return unflatten_sampled(groups, flatten_sampled(groups, arrays) + taught)
