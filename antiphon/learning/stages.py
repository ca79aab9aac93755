"""The stages of a training step, in the order the configuration lists them.

A stage is an async function of the `Step`; it reads what earlier stages left and leaves its own. A user's stage is named
in `learner.stages` as package.module:function.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from antiphon.algorithms.advantages import Advantages
from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.rhythm import amplified
from antiphon.learning.batch import build_batch, pack_samples, split_packs
from antiphon.learning.config import LearnerConfig
from antiphon.learning.learner import Trainer
from antiphon.registry import Registry
from antiphon.types import (
    ATTENTION_RHYTHM,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    FloatArray,
    Group,
    Pack,
    Sample,
    StreamSpec,
    TrainBatch,
)

STAGES = Registry(
    "stage",
    {
        "annotate": "antiphon.learning.stages:annotate",
        "advantages": "antiphon.learning.stages:advantages",
        "update_actor": "antiphon.learning.stages:update_actor",
    },
)


@dataclass(slots=True, kw_only=True)
class Step:
    """What the stages of one training step work on."""

    groups: Sequence[Group]
    samples: list[list[Sample]]  # of each group
    learner: Trainer
    reference: Trainer | None
    estimate: Advantages
    algorithm: AlgorithmConfig
    config: LearnerConfig
    max_tokens: int  # of one completion
    metrics: dict[str, float] = field(default_factory=dict)
    batches: list[TrainBatch] = field(default_factory=list)  # that the learner was given


Stage = Callable[[Step], Awaitable[None]]


async def annotate(step: Step) -> None:
    """Add the streams that the algorithm needs: log-probs of the reference model, if a divergence from it is penalised;
    those of the policy before its first update, if a later one compares itself with them; the rhythm of its attention."""
    if step.reference is not None:
        await _add(step, REFERENCE_LOGPROBS, step.reference.score)
    if step.algorithm.needs_proximal and step.config.updates > 1:
        await _add(step, PROXIMAL_LOGPROBS, step.learner.score)
    if step.algorithm.rhythm.reads_attention:
        await _add(step, ATTENTION_RHYTHM, step.learner.attend)


async def _add(step: Step, stream: StreamSpec, score: Callable[[list[Pack]], Awaitable[list[FloatArray]]]) -> None:
    flat = [sample for group in step.samples for sample in group]
    members, packs = pack_samples(flat, step.config.tokens_per_pack)
    scored = iter(split_packs(flat, members, await score(packs)))
    step.samples = [
        [replace(sample, streams=sample.streams.with_stream(stream, next(scored))) for sample in group]
        for group in step.samples
    ]


async def advantages(step: Step) -> None:
    """Give every token its advantage, amplified where the rhythm says so, and no weight to what is masked out."""
    estimated = step.estimate(step.groups)
    bound = step.algorithm.advantage_clip
    for index, (group, per_trajectory) in enumerate(zip(step.samples, estimated, strict=True)):
        arrays = [array for per_segment in per_trajectory for array in per_segment]
        step.samples[index] = [
            replace(
                sample,
                advantages=amplified(sample, np.clip(array, -bound, bound) if bound else array, step.algorithm.rhythm),
                weights=sample.weights * (not (step.algorithm.mask_truncated and sample.meta.truncated)),
            )
            for sample, array in zip(group, arrays, strict=True)
        ]


async def update_actor(step: Step) -> None:
    """Cut the samples into updates and train on them."""
    algorithm = step.algorithm
    batch = build_batch(
        step.samples,
        aggregation=algorithm.aggregation,
        max_tokens=step.max_tokens,
        minibatches=step.config.minibatches,
        epochs=step.config.epochs,
        tokens_per_pack=step.config.tokens_per_pack,
        skip_zero_advantage=algorithm.zero_without_advantage,
    )
    step.batches.append(batch)
    trained = await step.learner.step(batch)
    step.metrics |= {f"learner/{name}": value for name, value in trained.items()}
