"""The default training step, stage by stage, in the order in which a configuration lists them (`learner.stages`).

    annotate         models       -> streams of each token: log-probs, values, attention statistics
    rewards          scores       -> reward and weight of each trajectory
    advantages       rewards      -> advantage of each token
    update_critics   returns      -> updates of the critics
    update_actor     advantages   -> updates of the policy

A stage is an async function of the `Step` (`learning/step.py`): it reads what earlier stages left there and adds its own, keyed
by sample. The decorator `stage` declares the streams that it reads and adds. A user's stage is named in `learner.stages` as
package.module:function, among these or instead of them; `docs/new_loss.md` has an example.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from antiphon.algorithms.config import Aggregation
from antiphon.algorithms.declarations import stage
from antiphon.algorithms.rewards import shape_rewards, trajectory_weights
from antiphon.algorithms.sections import LossWeightConfig, RewardConfig
from antiphon.algorithms.trajectories import trajectories
from antiphon.algorithms.value_targets import value_targets
from antiphon.core.registry import Registry, bind_options
from antiphon.core.types import (
    ATTENTION_RHYTHM,
    ENTROPY_WEIGHT,
    KL_REWARD,
    POLICY_ENTROPY,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    TEACHER_LOGPROBS,
    TOKEN_AGE,
    VALUES,
    Sample,
    TrainBatch,
)
from antiphon.core.user_errors import name_user_errors
from antiphon.learning.batch import BatchOptions, build_batch
from antiphon.learning.config import LearnerConfig
from antiphon.learning.credit import agreement_masks, critic_samples, subtract_kl, token_advantages
from antiphon.learning.model_streams import query_models
from antiphon.learning.step import Stage, Step, by_key, gather_keyed

STAGES = Registry(
    "stage",
    {
        name: f"antiphon.learning.stages:{name}"
        for name in ("annotate", "rewards", "advantages", "update_critics", "update_actor")
    },
    callables=True,
)


def resolve_stages(config: LearnerConfig) -> list[Stage]:
    """Import the stages of a step, and bind the options of each; `ConfigError` if one cannot be called with them."""
    found = []
    for index, name in enumerate(config.stages):
        key = f"learner.stages.{index}"
        resolved = STAGES.resolve(name, key)
        if name not in STAGES.shipped:
            resolved = name_user_errors(resolved, key, name)
        found.append(bind_options(resolved, config.stage_options.get(name, {}), f"learner.stage_options.{name}"))
    return found


@stage(
    produces=[
        REFERENCE_LOGPROBS,
        PROXIMAL_LOGPROBS,
        POLICY_ENTROPY,
        TEACHER_LOGPROBS,
        VALUES,
        ATTENTION_RHYTHM,
        TOKEN_AGE,
    ],
)
async def annotate(step: Step) -> None:
    """Add the streams that the algorithm needs, and no others. All models are asked at once."""
    for spec, arrays in (await query_models(step)).items():
        step.add_stream(spec, arrays)
    if TOKEN_AGE in step.algorithm.required_streams:
        versions = {key: sample.segment.versions for key, sample in by_key(step.samples).items()}
        ages = {key: np.maximum(step.version - each, 0).astype(np.float32) for key, each in versions.items()}
        step.add_stream(TOKEN_AGE, ages)


async def rewards(step: Step) -> None:
    """Shape each trajectory's score into its reward, and set how much the trajectory counts in the loss."""
    algorithm, pipeline = step.algorithm, step.pipeline
    if (algorithm.reward, algorithm.weight) == (RewardConfig(), LossWeightConfig()):
        return  # scores are rewards
    metas = [[samples[0].meta for samples in trajectories(group)] for group in step.samples]
    shaped = shape_rewards(metas, algorithm.reward, pipeline.algorithm_state.rewards, pipeline.max_tokens)
    weights = trajectory_weights(metas, algorithm.weight)
    made: dict[Any, dict[str, Any]] = {
        meta.id: {"reward": float(reward), "turn_divisor": of_group.turn_divisor, "weights": weight}
        for group, of_group, column in zip(metas, shaped, weights, strict=True)
        for meta, reward, weight in zip(group, of_group.rewards, column, strict=True)
    }
    samples = by_key(step.samples)
    step.update_samples(
        {
            key: made[one.meta.id] | {"weights": one.weights * made[one.meta.id]["weights"]}
            for key, one in samples.items()
        }
    )
    step.metrics["reward/shaped"] = float(np.mean([each["reward"] for each in made.values()]))
    step.metrics["weight/masked"] = float(np.mean([each["weights"] == 0 for each in made.values()]))


@stage(produces=[KL_REWARD, ENTROPY_WEIGHT])
async def advantages(step: Step) -> None:
    """Give every token its advantage; mask tokens on whose value critics agree or disagree too much."""
    subtract_kl(step)
    estimated = by_key(token_advantages(step))
    if masks := agreement_masks(step):
        estimated = {key: np.where(masks.agreed[key], np.float32(0), array) for key, array in estimated.items()}
        step.add_stream(*masks.entropy_weights())
    step.update_samples({key: {"advantages": array} for key, array in estimated.items()})


@stage(produces=[KL_REWARD, RETURNS])
async def update_critics(step: Step) -> None:
    """Fit each critic to the returns: of all samples, or of a share of each group's trajectories that no other critic sees."""
    critic, critics = step.pipeline.critic, step.pipeline.critics
    if critic is None:
        return
    subtract_kl(step)
    targets = by_key(value_targets(step.samples, step.algorithm, critic.gae_lambda))
    step.add_stream(RETURNS, {key: array.astype(np.float32) for key, array in targets.items()})
    shares = len(critics) if critic.disjoint else 1
    batches = {
        number: _build(step, critic_samples(step, number, shares), step.pipeline.critic_ranks, "token_mean")
        for number in range(len(critics))
    }
    trained = await gather_keyed({number: critics[number].step(batch) for number, batch in batches.items()})
    for number, metrics in trained.items():
        step.metrics |= {f"critic/{number}/{name}": value for name, value in metrics.items()}


async def update_actor(step: Step) -> None:
    """Divide the samples into updates and train the policy on them, except while critics warm up."""
    pipeline, algorithm = step.pipeline, step.algorithm
    if pipeline.critic is not None and step.number <= pipeline.critic.warmup_steps:
        return
    kept = step.learner_streams()
    samples = [[replace(one, streams=one.streams.only(kept)) for one in group] for group in step.samples]
    skip = algorithm.skips_zero_advantage(pipeline.loss)
    batch = _build(step, samples, pipeline.config.mesh.data, algorithm.aggregation, skip)
    step.batches.append(batch)
    trained = await pipeline.learner.step(batch)
    step.metrics |= {f"learner/{name}": value for name, value in trained.items()}


def _build(
    step: Step, samples: Sequence[Sequence[Sample]], ranks: int, aggregation: Aggregation, skip: bool = False
) -> TrainBatch:
    config = step.pipeline.config
    options = BatchOptions(
        aggregation=aggregation,
        max_tokens=step.pipeline.max_tokens,
        tokens_per_pack=config.tokens_per_pack,
        minibatches=config.minibatches,
        epochs=config.epochs,
        skip_zero_advantage=skip,
        ranks=ranks,
        share_prefixes=config.share_prefixes,
    )
    return build_batch(samples, options)
