"""Advantages from teachers: on-policy distillation. Pure numpy."""

from collections.abc import Mapping

import numpy as np

from antiphon.algorithms.batch_arrays import flatten_sampled, unflatten_sampled
from antiphon.algorithms.trajectories import Arrays, Samples, gather_sampled, policy_logprobs
from antiphon.core.types import (
    TEACHER_LOGPROBS,
)


def add_teacher_advantages(groups: Samples, arrays: Arrays, coefficients: Mapping[str, float]) -> Arrays:
    """Add c (log teacher - log policy) to the advantage of each sampled token, c the coefficient of its task.

    The policy is that before the step if its log-probs are known, else the one that sampled.

    Source: Agarwal et al. 2024, "On-policy distillation of language models"; one token at a time as in Lu et al. 2025,
    "On-policy distillation".
    """
    flat = [sample for group in groups for sample in group]
    if not flat:
        return arrays
    factors = gather_sampled(flat, [np.full(len(s.segment.tokens), coefficients[s.meta.task]) for s in flat])
    taught = gather_sampled(flat, [s.streams[TEACHER_LOGPROBS] for s in flat]) - policy_logprobs(flat)
    return unflatten_sampled(groups, flatten_sampled(groups, arrays) + factors * taught)
