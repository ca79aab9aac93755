"""Advantages of the tokens of a step: the estimate of the algorithm, and what the settings around it make of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from antiphon.algorithms.attention_credit import amplify_advantages
from antiphon.algorithms.batch_arrays import flatten_sampled, select_lowest, whiten
from antiphon.algorithms.kl_reward import add_kl_rewards
from antiphon.algorithms.teacher_advantages import add_teacher_advantages
from antiphon.algorithms.trajectories import Arrays, trajectories
from antiphon.core.types import (
    ENTROPY_WEIGHT,
    KL_REWARD,
    OLD_VALUE,
    RETURNS,
    VALUES,
    BoolArray,
    FloatArray,
    Sample,
    Streams,
    StreamSpec,
)
from antiphon.learning.step import SampleKey, Step, by_key


def subtract_kl(step: Step) -> None:
    """Subtract the KL penalty from rewards, with `kl.place: reward`; adapt its coefficient for the next step.

    Done once in a step, by whichever stage needs it first.
    """
    kl = step.algorithm.kl
    if not kl.in_reward or all(KL_REWARD in sample.streams for sample in step.flat):
        return
    step.samples = add_kl_rewards(step.samples, kl)
    penalties = flatten_sampled(step.samples, [[one.streams[KL_REWARD] for one in group] for group in step.samples])
    mean_kl = float(-penalties.mean() / kl.coefficient)
    step.metrics |= {"reward/kl": mean_kl, "reward/kl_coefficient": kl.coefficient}
    if kl.target:
        count = sum(len(trajectories(group)) for group in step.samples)
        step.pipeline.algorithm_state.adapt(kl, mean_kl, count)


def token_advantages(step: Step) -> list[list[FloatArray]]:
    """Return the advantages [group][sample] -> [L]: estimated, then whitened, clipped and amplified if configured."""
    samples, algorithm = step.samples, step.algorithm
    estimated = step.pipeline.estimate_advantages(samples, algorithm)
    if algorithm.teacher_coefficient:
        estimated = add_teacher_advantages(samples, estimated, _teacher_coefficients(step))
    if algorithm.advantage_whiten:
        estimated = whiten(samples, estimated)
    if bound := algorithm.advantage_clip:
        estimated = [[np.clip(array, -bound, bound) for array in group] for group in estimated]
    return [
        [
            amplify_advantages(sample, array, algorithm.rhythm).astype(np.float32)
            for sample, array in zip(group, arrays, strict=True)
        ]
        for group, arrays in zip(samples, estimated, strict=True)
    ]


def _teacher_coefficients(step: Step) -> dict[str, float]:
    """Return the coefficient of each task's teachers: that of the algorithm by the mean of their weights."""
    teachers = [teacher for teacher, _ in step.pipeline.teachers]
    weights = {
        task: [teacher.weight for teacher in teachers if not teacher.tasks or task in teacher.tasks]
        for task in {sample.meta.task for sample in step.flat}
    }
    return {task: step.algorithm.teacher_coefficient * fmean(each or [0.0]) for task, each in weights.items()}


@dataclass(frozen=True, slots=True)
class AgreementMasks:
    """Tokens [L] of each sample on whose value the critics agree most, and least."""

    agreed: Mapping[SampleKey, BoolArray]  # have no advantage
    disagreed: Mapping[SampleKey, BoolArray]  # have no entropy bonus

    def entropy_weights(self) -> tuple[StreamSpec, dict[SampleKey, FloatArray]]:
        """Return the stream of what each token's entropy counts in the bonus."""
        return ENTROPY_WEIGHT, {key: (~mask).astype(np.float32) for key, mask in self.disagreed.items()}


def agreement_masks(step: Step) -> AgreementMasks | None:
    """Return the tokens to mask by how far the critics agree; None where nothing is to be masked.

    Source: Liu et al. 2025, "Asymmetric proximal policy optimization".
    """
    samples, algorithm = step.samples, step.algorithm
    if not (algorithm.agreement_mask or algorithm.disagreement_mask):
        return None
    spread: Arrays = [[_value_spread(sample.streams[VALUES]) for sample in group] for group in samples]
    everywhere = flatten_sampled(samples, spread)
    step.metrics["critic/spread"] = float(everywhere.mean())
    if not np.ptp(everywhere):  # critics that have not learned yet
        return None
    negated = [[-array for array in group] for group in spread]
    return AgreementMasks(
        agreed=by_key(select_lowest(samples, spread, algorithm.agreement_mask)),
        disagreed=by_key(select_lowest(samples, negated, algorithm.disagreement_mask)),
    )


def _value_spread(values: FloatArray) -> NDArray[np.float64]:
    """Return the standard deviation of the critics' values of each token, [L] from [L, critics]; 0 for equal values."""
    spread: NDArray[np.float64] = np.subtract(values, values[:, :1], dtype=np.float64).std(axis=-1)
    return spread


def critic_samples(step: Step, number: int, shares: int) -> list[list[Sample]]:
    """Return the samples of each group that a critic learns from, with the streams that it needs.

    Args:
        step: The step, with `RETURNS` and `VALUES`.
        number: Which critic.
        shares: Number of disjoint shares of each group's trajectories; the critic has one of them.
    """

    def with_targets(sample: Sample) -> Sample:
        old = sample.streams[VALUES][:, number].copy()
        return replace(sample, streams=Streams({RETURNS: sample.streams[RETURNS], OLD_VALUE: old}))

    def share(group: Sequence[Sample]) -> list[Sample]:
        own = [each for index, each in enumerate(trajectories(group)) if index % shares == number % shares]
        return [with_targets(sample) for samples in own for sample in samples]

    return [share(group) for group in step.samples]
