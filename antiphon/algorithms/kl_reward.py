"""The divergence from the reference model as a penalty in the rewards. Pure numpy."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from antiphon.algorithms.divergence import estimate_kl
from antiphon.algorithms.sections import KlConfig
from antiphon.algorithms.trajectories import Samples, gather_sampled, policy_logprobs, scatter_sampled, trajectories
from antiphon.core.types import (
    KL_REWARD,
    REFERENCE_LOGPROBS,
    Sample,
)


def add_kl_rewards(groups: Samples, config: KlConfig) -> list[list[Sample]]:
    """Subtract the KL penalty from rewards.

    `KL_REWARD` has the penalty of each token, `Sample.reward` includes all of it, and `Sample.task_reward` is the reward
    without it.

    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", section 2.
    """

    def paid(samples: Sequence[Sample]) -> Iterator[Sample]:
        earned = -config.coefficient * reference_divergence(samples, config)
        reward = samples[0].reward + float(earned.sum())
        for sample, array in zip(samples, scatter_sampled(samples, earned), strict=True):
            streams = sample.streams.with_stream(KL_REWARD, array)
            yield replace(sample, reward=reward, task_reward=sample.reward, streams=streams)

    return [[sample for samples in trajectories(group) for sample in paid(samples)] for group in groups]


def reference_divergence(samples: Sequence[Sample], config: KlConfig) -> np.ndarray:
    """Return the estimated divergence at each sampled token of a trajectory, [T].

    The policy is that before the step if its log-probs are known, else the one that sampled.
    """
    return estimate_kl(
        policy_logprobs(samples),
        gather_sampled(samples, [s.streams[REFERENCE_LOGPROBS] for s in samples]),
        config.estimator,
        np,
    )
