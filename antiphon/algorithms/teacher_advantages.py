"""Advantages from teachers: on-policy distillation. Pure numpy."""

from antiphon.algorithms.batch_arrays import flatten_sampled, unflatten_sampled
from antiphon.algorithms.trajectories import Arrays, Samples, gather_sampled, policy_logprobs
from antiphon.core.types import (
    TEACHER_LOGPROBS,
)


def add_teacher_advantages(groups: Samples, arrays: Arrays, coefficient: float) -> Arrays:
    """Add `coefficient` (log teacher - log policy) to the advantage of each sampled token.

    The policy is that before the step if its log-probs are known, else the one that sampled.

    Source: Agarwal et al. 2024, "On-policy distillation of language models"; one token at a time as in Lu et al. 2025,
    "On-policy distillation".
    """
    flat = [sample for group in groups for sample in group]
    if not flat:
        return arrays
    taught = coefficient * (gather_sampled(flat, [s.streams[TEACHER_LOGPROBS] for s in flat]) - policy_logprobs(flat))
    return unflatten_sampled(groups, flatten_sampled(groups, arrays) + taught)
