"""The stages of a training step, in the order the configuration lists them.

A stage is an async function of the `Step`; it reads what earlier stages left and leaves its own. A user's stage is named
in `learner.stages` as package.module:function.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.algorithms.advantages import (
    Advantages,
    Arrays,
    add_kl_rewards,
    add_teacher_advantages,
    flatten_sampled,
    select_lowest,
    trajectories,
    value_targets,
    whiten,
)
from antiphon.algorithms.attention_credit import amplify_advantages
from antiphon.algorithms.config import Aggregation, AlgorithmConfig, LossWeightConfig, RewardConfig
from antiphon.algorithms.rewards import Controllers, shape_rewards, trajectory_weights
from antiphon.core.registry import Registry
from antiphon.core.types import (
    ATTENTION_RHYTHM,
    ENTROPY_WEIGHT,
    KL_REWARD,
    OLD_VALUE,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    ROUTED_EXPERTS,
    TEACHER_LOGPROBS,
    TOKEN_AGE,
    VALUES,
    FloatArray,
    Group,
    Pack,
    Sample,
    Streams,
    StreamSpec,
    TrainBatch,
)
from antiphon.learning.batch import build_batch, digest_batches, make_samples, pack_samples, split_packs
from antiphon.learning.config import CriticConfig, LearnerConfig, TeacherConfig
from antiphon.learning.learner import Scorer, Trainer

STAGES = Registry(
    "stage",
    {
        name: f"antiphon.learning.stages:{name}"
        for name in ("annotate", "rewards", "advantages", "update_critics", "update_actor")
    },
)


Wait = Callable[[Awaitable[Any]], Awaitable[Any]]  # with a deadline


async def _at_will(work: Awaitable[Any]) -> Any:
    return await work


@dataclass(slots=True, kw_only=True)
class StepPipeline:
    """What makes updates of groups, from step to step."""

    learner: Trainer
    reference: Scorer | None = None
    critics: Sequence[Trainer] = ()
    teachers: Sequence[tuple[TeacherConfig, Scorer]] = ()
    algorithm: AlgorithmConfig
    config: LearnerConfig
    critic: CriticConfig | None = None
    critic_ranks: int  # shares that the packs of a critic are divided into
    estimate_advantages: Advantages
    stages: Sequence["Stage"]
    max_tokens: int  # of one completion
    controllers: Controllers = field(default_factory=Controllers)

    async def learn(
        self, number: int, version: int, groups: Sequence[Group], wait: Wait = _at_will
    ) -> tuple[dict[str, float], str]:
        """Take step `number`, after `version`, through the stages; each is waited for with `wait`. Returns the metrics, and the
        digest of what the learner was given."""
        step = Step(number=number, version=version, samples=make_samples(groups), pipeline=self)
        for stage in self.stages:
            await wait(stage(step))
        return step.metrics, digest_batches(step.batches)


@dataclass(slots=True, kw_only=True)
class Step:
    """What the stages of one training step work on."""

    number: int  # from 1
    version: int  # before the step
    samples: list[list[Sample]]  # of each group, those of a trajectory one after another
    pipeline: StepPipeline
    algorithm: AlgorithmConfig = field(init=False)  # with the coefficients of this step
    metrics: dict[str, float] = field(default_factory=dict)
    batches: list[TrainBatch] = field(default_factory=list)  # that the learner was given

    def __post_init__(self) -> None:
        self.algorithm, adapted = self.pipeline.algorithm, self.pipeline.controllers.kl
        if adapted is not None:
            kl = self.algorithm.kl.model_copy(update={"coefficient": adapted})
            self.algorithm = self.algorithm.model_copy(update={"kl": kl})

    @property
    def flat(self) -> list[Sample]:
        """All samples."""
        return [sample for group in self.samples for sample in group]

    def add_stream(self, spec: StreamSpec, arrays: Iterable[NDArray[Any]]) -> None:
        """Add a stream, an array [L, …] a sample in the order of `flat`."""
        left = iter(arrays)
        self.update_samples(lambda sample: {"streams": sample.streams.with_stream(spec, next(left))})

    def update_samples(self, of: Callable[[Sample], dict[str, Any]]) -> None:
        """Replace fields of all samples, in the order of `flat`."""
        self.samples = [[replace(sample, **of(sample)) for sample in group] for group in self.samples]


Stage = Callable[[Step], Awaitable[None]]
Ask = Callable[[list[Pack]], Awaitable[list[FloatArray]]]


async def annotate(step: Step) -> None:
    """Add the streams that the algorithm needs, and none that it does not: log-probs of the reference model; those of the
    policy before its first update, if a later one compares itself with them; the rhythm of its attention; what critics and
    teachers say; how old each token is. The models are asked at once."""
    pipeline, correction = step.pipeline, step.pipeline.algorithm.correction
    asked: dict[StreamSpec, Ask] = {}
    if pipeline.reference is not None:
        asked[REFERENCE_LOGPROBS] = pipeline.reference.score
    first = PROXIMAL_LOGPROBS.name in pipeline.algorithm.required_streams and pipeline.config.updates > 1
    if first or PROXIMAL_LOGPROBS.name in pipeline.algorithm.streams:
        asked[PROXIMAL_LOGPROBS] = pipeline.learner.score
    if pipeline.algorithm.rhythm.reads_attention:
        asked[ATTENTION_RHYTHM] = pipeline.learner.attention_stats
    if pipeline.critics:
        asked[StreamSpec(VALUES, shape=(len(pipeline.critics),))] = partial(_values, pipeline.critics)
    if asked:
        for spec, arrays in zip(asked, await _query_models(step, step.flat, *asked.values()), strict=True):
            step.add_stream(spec, arrays)
    if pipeline.teachers:
        step.add_stream(TEACHER_LOGPROBS, await _teacher_logprobs(step))
    if correction.on and correction.proximal == "interpolated":
        ages = (np.maximum(step.version - sample.segment.versions, 0).astype(np.float32) for sample in step.flat)
        step.add_stream(TOKEN_AGE, ages)


async def _values(critics: Sequence[Scorer], packs: list[Pack]) -> list[FloatArray]:
    """What all critics say, [T, critics] a pack."""
    columns = await asyncio.gather(*(critic.score(packs) for critic in critics))
    return [np.stack(said, axis=-1) for said in zip(*columns, strict=True)]


async def _teacher_logprobs(step: Step) -> list[FloatArray]:
    """What the teachers of its task say on average of each token of each sample, [L]; for a task that has none, what the policy
    said itself."""
    flat, heard = step.flat, defaultdict[int, list[FloatArray]](list)
    teachers = step.pipeline.teachers
    pupils = [
        [i for i, sample in enumerate(flat) if not config.tasks or sample.meta.task in config.tasks]
        for config, _ in teachers
    ]
    lessons = (
        _query_models(step, [flat[i] for i in mine], teacher.score)
        for mine, (_, teacher) in zip(pupils, teachers, strict=True)
    )
    for mine, (said,) in zip(pupils, await asyncio.gather(*lessons), strict=True):
        for index, array in zip(mine, said, strict=True):
            heard[index].append(array)
    return [
        np.mean(heard[index], axis=0, dtype=np.float32)
        if index in heard
        else sample.streams.get(PROXIMAL_LOGPROBS, sample.segment.logprobs)
        for index, sample in enumerate(flat)
    ]


async def _query_models(step: Step, samples: Sequence[Sample], *asked: Ask) -> list[list[FloatArray]]:
    """What each of the models says of each token of each sample, [L, …]."""
    config = step.pipeline.config
    members, packs = pack_samples(samples, config.tokens_per_pack, (ROUTED_EXPERTS,), config.share_prefixes)
    bare = [replace(pack, streams=Streams()) for pack in packs]  # no other model has the policy's experts
    own = (step.pipeline.learner.score, step.pipeline.learner.attention_stats)
    said = await asyncio.gather(*(ask(packs if ask in own else bare) for ask in asked))
    return [split_packs(samples, members, arrays, config.share_prefixes) for arrays in said]


async def rewards(step: Step) -> None:
    """Make each trajectory's reward of its score, and of each turn's accordingly, and decide how much it counts."""
    pipeline, algorithm = step.pipeline, step.pipeline.algorithm
    if (algorithm.reward, algorithm.weight) == (RewardConfig(), LossWeightConfig()):
        return  # scores as they are
    metas = [[samples[0].meta for samples in trajectories(group)] for group in step.samples]
    of_scores = shape_rewards(metas, algorithm.reward, pipeline.controllers.rewards, pipeline.max_tokens)
    weighed = trajectory_weights(metas, algorithm.weight)
    given = {
        meta.id: {"reward": float(reward), "turn_divisor": of_group.turn_divisor, "weights": weight}
        for group, of_group, column in zip(metas, of_scores, weighed, strict=True)
        for meta, reward, weight in zip(group, of_group.rewards, column, strict=True)
    }

    def changed(sample: Sample) -> dict[str, Any]:
        made = given[sample.meta.id]
        return {**made, "weights": sample.weights * made["weights"]}

    step.update_samples(changed)
    step.metrics["reward/shaped"] = float(np.mean([made["reward"] for made in given.values()]))
    step.metrics["weight/masked"] = float(np.mean([made["weights"] == 0 for made in given.values()]))


async def advantages(step: Step) -> None:
    """Take the divergence from the reference off rewards, if `kl.place: reward` says so; give every token its advantage,
    amplified where the rhythm says so; where critics agree or disagree too much, none, or no reward of its entropy."""
    algorithm = step.algorithm
    _take_off_kl(step)
    estimated = step.pipeline.estimate_advantages(step.samples, algorithm)
    if algorithm.teacher_coefficient:
        estimated = add_teacher_advantages(step.samples, estimated, algorithm.teacher_coefficient)
    if algorithm.advantage_whiten:
        estimated = whiten(step.samples, estimated)
    if algorithm.advantage_clip:
        bound = algorithm.advantage_clip
        estimated = [[np.clip(array, -bound, bound) for array in group] for group in estimated]
    estimated = [
        [
            amplify_advantages(sample, array, algorithm.rhythm).astype(np.float32)
            for sample, array in zip(*pair, strict=True)
        ]
        for pair in zip(step.samples, estimated, strict=True)
    ]
    _mask_by_spread(step, estimated)
    left = iter([array for group in estimated for array in group])
    step.update_samples(lambda sample: {"advantages": next(left)})


def _take_off_kl(step: Step) -> None:
    """Have samples with the divergence in their rewards, once, whichever stage asks first; and adapt its coefficient for the
    next step."""
    kl = step.algorithm.kl
    if not kl.in_reward or all(KL_REWARD in sample.streams for sample in step.flat):
        return
    step.samples = add_kl_rewards(step.samples, kl)
    paid = flatten_sampled(step.samples, [[sample.streams[KL_REWARD] for sample in group] for group in step.samples])
    apart = float(-paid.mean() / kl.coefficient)
    step.metrics |= {"reward/kl": apart, "reward/kl_coefficient": kl.coefficient}
    if kl.target:
        step.pipeline.controllers.adapt(kl, apart, sum(map(len, map(trajectories, step.samples))))


def _mask_by_spread(step: Step, estimated: Arrays) -> None:
    """Take the advantage from the tokens on whose value critics agree most, and from those on which they do so least the
    reward of their entropy.

    Source: Liu et al. 2025, "Asymmetric proximal policy optimization".
    """
    algorithm = step.pipeline.algorithm
    if not (algorithm.agreement_mask or algorithm.disagreement_mask):
        return
    spread = [[_spread(sample.streams.named(VALUES)) for sample in group] for group in step.samples]
    everywhere = flatten_sampled(step.samples, spread)
    step.metrics["critic/spread"] = float(everywhere.mean())
    if not np.ptp(everywhere):  # critics that have not learned yet
        return
    agreed = select_lowest(step.samples, spread, algorithm.agreement_mask)
    for per_group, masks in zip(estimated, agreed, strict=True):
        for array, mask in zip(per_group, masks, strict=True):
            array[mask] = 0
    disagreed = select_lowest(
        step.samples, [[-array for array in group] for group in spread], algorithm.disagreement_mask
    )
    step.add_stream(ENTROPY_WEIGHT, ((~mask).astype(np.float32) for group in disagreed for mask in group))


def _spread(values: FloatArray) -> NDArray[np.float64]:
    """Deviation of what critics say of each token, [L, critics] to [L]; 0 where all say the same, whatever it is."""
    spread: NDArray[np.float64] = np.subtract(values, values[:, :1], dtype=np.float64).std(axis=-1)
    return spread


async def update_critics(step: Step) -> None:
    """Fit each critic to what followed: to all samples, or of each group's trajectories to a share that no other sees."""
    pipeline = step.pipeline
    if pipeline.critic is None:
        return
    _take_off_kl(step)
    targets = value_targets(step.samples, step.algorithm, pipeline.critic.gae_lambda)
    step.add_stream(RETURNS, (array.astype(np.float32) for group in targets for array in group))
    count = len(pipeline.critics) if pipeline.critic.disjoint else 1
    batches = [
        _batch(step, [_for_critic(group, number, count) for group in step.samples], pipeline.critic_ranks, "token_mean")
        for number in range(len(pipeline.critics))
    ]
    trained = await asyncio.gather(
        *(critic.step(batch) for critic, batch in zip(pipeline.critics, batches, strict=True))
    )
    for number, metrics in enumerate(trained):
        step.metrics |= {f"critic/{number}/{name}": value for name, value in metrics.items()}


def _for_critic(group: Sequence[Sample], number: int, shares: int) -> list[Sample]:
    """What critic `number` learns from: of so many shares of the trajectories its own, with the streams that it needs."""
    return [
        replace(
            sample,
            streams=Streams(
                {RETURNS: sample.streams[RETURNS], OLD_VALUE: sample.streams.named(VALUES)[:, number].copy()}
            ),
        )
        for index, samples in enumerate(trajectories(group))
        for sample in samples
        if index % shares == number % shares
    ]


async def update_actor(step: Step) -> None:
    """Cut the samples into updates and train on them; not while critics warm up."""
    pipeline = step.pipeline
    if pipeline.critic is not None and step.number <= pipeline.critic.warmup_steps:
        return
    algorithm = pipeline.algorithm
    spent = {VALUES, RETURNS.name, TEACHER_LOGPROBS.name, ATTENTION_RHYTHM.name, KL_REWARD.name}
    spent |= set() if algorithm.kl.in_loss else {REFERENCE_LOGPROBS.name}
    spent -= set(algorithm.streams)
    if any(spec.name in spent for sample in step.flat[:1] for spec in sample.streams):  # what no loss looks at
        step.update_samples(lambda sample: {"streams": sample.streams.without(spent)})
    ranks = pipeline.config.mesh.data
    batch = _batch(step, step.samples, ranks, algorithm.aggregation, algorithm.zero_at_zero_advantage)
    step.batches.append(batch)
    trained = await pipeline.learner.step(batch)
    step.metrics |= {f"learner/{name}": value for name, value in trained.items()}


def _batch(
    step: Step,
    samples: Sequence[Sequence[Sample]],
    ranks: int,
    aggregation: Aggregation,
    skip_zero_advantage: bool = False,
) -> TrainBatch:
    return build_batch(
        samples,
        aggregation=aggregation,
        max_tokens=step.pipeline.max_tokens,
        minibatches=step.pipeline.config.minibatches,
        epochs=step.pipeline.config.epochs,
        tokens_per_pack=step.pipeline.config.tokens_per_pack,
        skip_zero_advantage=skip_zero_advantage,
        ranks=ranks,
        share=step.pipeline.config.share_prefixes,
    )
