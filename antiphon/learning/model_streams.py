"""Streams that the models of a run compute, for the `annotate` stage: log-probs, values or attention statistics of each token.

A stream of a user's own is computed by a stage of their own: `docs/new_loss.md`.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from antiphon.core.errors import ConfigError
from antiphon.core.types import (
    ATTENTION_RHYTHM,
    POLICY_ENTROPY,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    ROUTED_EXPERTS,
    SAMPLING_SUPPORT,
    TEACHER_LOGPROBS,
    VALUES,
    FloatArray,
    Pack,
    Sample,
    StreamSpec,
)
from antiphon.learning.config import LearnerConfig
from antiphon.learning.learner import Predictor, Trainer
from antiphon.learning.packing import pack_samples, split_packs
from antiphon.learning.step import SampleKey, Step, StepPipeline, by_key, gather_keyed

Query = Callable[[list[Pack]], Awaitable[list[FloatArray]]]
Arrays = dict[SampleKey, FloatArray]  # [L, …] of each sample


async def query_models(step: Step) -> dict[StreamSpec, Arrays]:
    """Ask all models that the algorithm needs, at once; return the streams that they give."""
    samples, specs = by_key(step.samples), step.streams_to_query()
    queries, config = _queries(step.pipeline), step.pipeline.config
    for spec in specs:
        if spec not in queries and spec != TEACHER_LOGPROBS:
            raise ConfigError(f"the stream {spec.name!r} is needed, and the run has no {spec.producer} to compute it")
    asked = {spec: queries[spec] for spec in specs if spec in queries}
    streams, taught = await asyncio.gather(
        query_samples(samples, asked, config), _teacher_logprobs(samples, step.pipeline)
    )
    if TEACHER_LOGPROBS in specs:  # where a task has no teacher, the policy's own log-probs: nothing to learn
        own = {key: sample.segment.logprobs for key, sample in samples.items()} | streams.get(PROXIMAL_LOGPROBS, {})
        streams[TEACHER_LOGPROBS] = own | taught
    return streams


def _queries(pipeline: StepPipeline) -> dict[StreamSpec, Query]:
    """Return the method of a model that computes each stream; teachers are asked task by task, see `_teacher_logprobs`."""
    queries: dict[StreamSpec, Query] = {
        PROXIMAL_LOGPROBS: pipeline.learner.predict,
        POLICY_ENTROPY: partial(_entropies, pipeline.learner),
        ATTENTION_RHYTHM: pipeline.learner.attention_stats,
    }
    if pipeline.reference is not None:
        queries[REFERENCE_LOGPROBS] = pipeline.reference.predict
    if pipeline.critics:
        queries[VALUES] = partial(_stack_values, pipeline.critics)
    return queries


async def _entropies(learner: Trainer, packs: list[Pack]) -> list[FloatArray]:
    """Return the entropy of each loss token, [T] a pack."""
    return [measured[:, 1] for measured in await learner.logprobs_and_entropies(packs)]


async def _stack_values(critics: Sequence[Predictor], packs: list[Pack]) -> list[FloatArray]:
    """Return the values of all critics, [T, critics] a pack."""
    columns = await asyncio.gather(*(critic.predict(packs) for critic in critics))
    return [np.stack(values, axis=-1) for values in zip(*columns, strict=True)]


async def _teacher_logprobs(samples: Mapping[SampleKey, Sample], pipeline: StepPipeline) -> Arrays:
    """Return the mean log-probs over the teachers of each sample's task by their weights; tasks without any are left out."""
    answers = await asyncio.gather(
        *(
            query_samples(
                {key: one for key, one in samples.items() if not teacher.tasks or one.meta.task in teacher.tasks},
                {TEACHER_LOGPROBS: model.predict},
                pipeline.config,
            )
            for teacher, model in pipeline.teachers
        )
    )
    by_sample = defaultdict[SampleKey, list[tuple[float, FloatArray]]](list)
    for answer, (teacher, _) in zip(answers, pipeline.teachers, strict=True):
        for key, logprobs in answer[TEACHER_LOGPROBS].items():
            by_sample[key].append((teacher.weight, logprobs))
    return {key: _weighted_mean(*zip(*weighted, strict=True)) for key, weighted in by_sample.items()}


def _weighted_mean(weights: Sequence[float], arrays: Sequence[FloatArray]) -> FloatArray:
    """Return the mean of arrays; where no weight is above 0, nothing is learned from it."""
    mean: FloatArray = np.average(arrays, axis=0, weights=weights if any(weights) else None).astype(np.float32)
    return mean


async def query_samples(
    samples: Mapping[SampleKey, Sample], queries: Mapping[StreamSpec, Query], config: LearnerConfig
) -> dict[StreamSpec, Arrays]:
    """Ask each query about the same packs; return its answer [L, …] for each sample."""
    if not queries:
        return {}
    flat = list(samples.values())
    replayed = (ROUTED_EXPERTS, SAMPLING_SUPPORT)
    members, packs = pack_samples(flat, config.tokens_per_pack, replayed, config.share_prefixes)
    # Only the policy replays the engine's experts; every model is asked about what could be sampled.
    bare = [replace(pack, streams=pack.streams.without([ROUTED_EXPERTS])) for pack in packs]
    answers = await gather_keyed(
        {spec: query(packs if spec.producer == "learner" else bare) for spec, query in queries.items()}
    )
    return {
        spec: dict(zip(samples, split_packs(flat, members, arrays, config.share_prefixes), strict=True))
        for spec, arrays in answers.items()
    }
