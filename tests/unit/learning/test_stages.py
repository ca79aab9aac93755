"""The stages of a step on a real learner; `tests/unit/run/test_user_functions.py` tests what a user's own may need."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.declarations import declaration_of, loss
from antiphon.algorithms.registry import ADVANTAGES, LOSSES
from antiphon.core.errors import ConfigError
from antiphon.core.types import (
    ENTROPY_WEIGHT,
    POLICY_ENTROPY,
    PROXIMAL_LOGPROBS,
    RETURNS,
    TOKEN_AGE,
    VALUES,
    AttemptId,
    StreamSpec,
)
from antiphon.learning.config import CriticConfig, LearnerConfig, OptimizerConfig, TeacherConfig
from antiphon.learning.learner import ModelRoles
from antiphon.learning.objectives.critic import CriticLearner
from antiphon.learning.pack_learner import learning_rate_factor
from antiphon.learning.stages import advantages, annotate, rewards, update_actor, update_critics
from antiphon.learning.step import Step, StepPipeline, by_key
from antiphon.learning.torch_learner import _turns

from .conftest import make_learner, make_sample


class Here:
    """A learner in this very process."""

    def __init__(self, learner):
        self.learner = learner
        self.packs = []

    async def predict(self, packs):
        return self.learner.predict(list(packs))

    async def logprobs_and_entropies(self, packs):
        return self.learner.logprobs_and_entropies(list(packs))

    async def attention_stats(self, packs):
        return self.learner.attention_stats(list(packs))

    async def step(self, batch):
        self.packs = [pack for update in batch.updates for rank in update.packs for pack in rank]
        return self.learner.step(batch)


def training(directory, algorithm, critics=(), critic=None, teachers=(), **config):
    learner, config = make_learner(directory, **config), LearnerConfig(**config)
    learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3), 4)
    return StepPipeline(
        learner=Here(learner),
        critics=critics,
        algorithm=algorithm,
        config=config,
        critic=critic,
        critic_ranks=1,
        teachers=teachers,
        estimate_advantages=ADVANTAGES.resolve(algorithm.advantage),
        loss=declaration_of(LOSSES.resolve(algorithm.loss)),
        stages=[],
        max_tokens=9,
    )


def step_of(directory, algorithm, groups=4, siblings=2, **config):
    rng = np.random.default_rng(3)
    samples = [
        [make_sample(rng, 9, AttemptId(group, n, 0), score=float(rng.integers(2))) for n in range(siblings)]
        for group in range(groups)
    ]
    return Step(number=1, version=0, samples=samples, pipeline=training(directory, algorithm, **config))


def test_tokens_of_high_entropy_are_amplified(model_directories):
    """The policy's entropy before the step, of the distribution that each token was chosen from."""
    algorithm = AlgorithmConfig(rhythm={"kind": "entropy", "share": 0.3, "amplification": 3.0}, advantage_clip=1.0)
    step = step_of(model_directories["llama"], algorithm)
    step.pipeline.estimate_advantages = lambda groups, _: [
        [np.full(9, -2.0, np.float32) for _ in samples] for samples in groups
    ]
    asyncio.run(annotate(step))
    asyncio.run(advantages(step))
    policy = AutoModelForCausalLM.from_pretrained(model_directories["llama"])
    for sample in step.flat:
        logits = policy(torch.from_numpy(sample.segment.tokens)[None].long()).logits[0].detach()
        before = torch.distributions.Categorical(logits=logits[:-1]).entropy().numpy()[sample.segment.loss_mask[1:]]
        np.testing.assert_allclose(sample.streams[POLICY_ENTROPY][sample.segment.loss_mask], before, atol=1e-5)
        chosen = np.argsort(-before)[: max(1, round(0.3 * len(before)))]
        amplified = sample.advantages[sample.segment.loss_mask] == -3.0
        assert np.flatnonzero(amplified).tolist() == sorted(chosen)


@pytest.mark.parametrize("minibatches, epochs, computed", [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_the_proximal_policy_is_that_of_before_the_first_update(model_directories, minibatches, epochs, computed):
    """... and where there is one update only it is not computed."""
    algorithm = AlgorithmConfig.model_validate("decoupled_ppo")
    step = step_of(model_directories["llama"], algorithm, minibatches=minibatches, epochs=epochs)
    asyncio.run(annotate(step))
    samples = [sample for group in step.samples for sample in group]
    assert [PROXIMAL_LOGPROBS in sample.streams for sample in samples] == [computed] * 8
    before = AutoModelForCausalLM.from_pretrained(model_directories["llama"])
    for sample in samples if computed else []:
        tokens = torch.from_numpy(sample.segment.tokens)[None].long()
        logits = before(tokens).logits[0].log_softmax(-1)
        wanted = logits[:-1].gather(1, tokens[0, 1:, None])[:, 0].detach().numpy()
        mask = sample.segment.loss_mask[1:]
        np.testing.assert_allclose(sample.streams[PROXIMAL_LOGPROBS][1:][mask], wanted[mask], atol=1e-5)
    asyncio.run(update_actor(step))
    assert step.metrics["learner/correction_weight"] > 0
    assert len(step.batches[0].updates) == minibatches * epochs


@pytest.mark.parametrize("loss, computed", [("ppo_clip", False), ("kimi", True)])
def test_zero_advantage_is_skipped_only_without_gradient(model_directories, loss, computed):
    step = step_of(model_directories["llama"], AlgorithmConfig(loss=loss))
    step.samples = [[replace(sample, advantages=0 * sample.advantages) for sample in group] for group in step.samples]
    asyncio.run(update_actor(step))
    (packs,) = step.batches[0].updates[0].packs
    assert bool(packs) == computed


def test_turns_are_stretches_of_places():
    places, sequence = torch.tensor([3, 4, 7, 8, 9, 20]), torch.tensor([0, 0, 0, 0, 1, 1])
    assert _turns(places, sequence).tolist() == [0, 0, 1, 1, 2, 3]
    assert _turns(places[:0], sequence[:0]).tolist() == []


def test_rewards_and_weights_reach_the_batch(model_directories):
    algorithm = AlgorithmConfig(
        advantage="reinforce", reward={"baseline": "batch"}, weight={"mask_difficulty": (0.4, 0.6)}
    )
    step = step_of(model_directories["llama"], algorithm)
    scores = [[sample.meta.score.value for sample in group] for group in step.samples]
    asyncio.run(rewards(step))
    asyncio.run(advantages(step))
    average = np.mean(scores)
    for group, of_group in zip(step.samples, scores, strict=True):
        for sample, score in zip(group, of_group, strict=True):
            np.testing.assert_allclose(sample.advantages[sample.segment.loss_mask], score - average, rtol=1e-6)
            assert (sample.weights == float(np.mean(of_group) == 0.5)).all()
    assert step.metrics["weight/masked"] == np.mean([np.mean(of_group) != 0.5 for of_group in scores]) != 0.5
    asyncio.run(update_actor(step))
    counted = sum(s.segment.loss_mask.sum() for group in step.samples for s in group if s.weights.any())
    assert step.batches[0].updates[0].loss_tokens == counted
    assert step.pipeline.algorithm_state.rewards.count == 8


def test_a_model_that_is_needed_and_not_there_is_named(model_directories):
    step = step_of(model_directories["llama"], AlgorithmConfig(kl={"coefficient": 0.1}))
    with pytest.raises(ConfigError, match="reference"):
        asyncio.run(annotate(step))


def test_tokens_are_as_old_as_the_versions_since(model_directories):
    algorithm = AlgorithmConfig(correction={"level": "token", "proximal": "interpolated"})
    step = step_of(model_directories["llama"], algorithm, minibatches=2)
    step.version = 3
    step.samples[0][0].segment.versions[:] = 1
    asyncio.run(annotate(step))
    assert PROXIMAL_LOGPROBS not in step.flat[0].streams, "a forward pass that nobody needs"
    assert set(step.flat[0].streams[TOKEN_AGE]) == {2} and set(step.flat[1].streams[TOKEN_AGE]) == {3}


def critics_of(directory, critic, seeds):
    found = []
    for seed in range(seeds):
        learner = CriticLearner(str(directory), LearnerConfig(), seed, critic)
        learner.begin(AlgorithmConfig(), critic.optimizer, 100)
        found.append(Here(learner))
    return found


def test_critics_learn_what_follows(model_directories):
    """... each from the responses that no other sees; and the actor waits until they are warm."""
    critic = CriticConfig(count=2, disjoint=True, warmup_steps=1, optimizer={"learning_rate": 3e-3})
    critics = critics_of(model_directories["llama"], critic, 2)
    algorithm = AlgorithmConfig.model_validate({"recipe": "asyppo", "advantage_whiten": False})
    step = step_of(model_directories["llama"], algorithm, siblings=4, critics=critics, critic=critic)
    fresh, errors = list(step.samples), []
    for _ in range(30):
        step.samples = list(fresh)
        for stage in (annotate, rewards, advantages, update_critics):
            asyncio.run(stage(step))
        errors.append(step.metrics["critic/0/squared_error"])
    assert errors[-1] < errors[0] / 4
    seen = [{int(pack.tokens.sum()) for pack in critic.packs} for critic in critics]
    assert not seen[0] & seen[1]
    for sample in step.flat:
        assert set(sample.streams[RETURNS][sample.segment.loss_mask]) == {np.float32(sample.meta.score.value)}
        assert sample.streams[VALUES].shape == (9, 2)
    asyncio.run(update_actor(step))
    assert not step.batches
    step.number = 2
    asyncio.run(update_actor(step))
    assert len(step.batches) == 1


def test_critic_disagreement_masks_advantage_and_entropy(model_directories):
    algorithm = AlgorithmConfig.model_validate({"recipe": "asyppo", "agreement_mask": 0.3, "disagreement_mask": 0.2})
    rng = np.random.default_rng(0)

    class Says(Here):
        async def predict(self, packs):
            return [rng.normal(size=len(pack.tokens)).astype(np.float32) for pack in packs]

    critic = CriticConfig(count=3)
    step = step_of(model_directories["llama"], algorithm, siblings=4, critics=[Says(None)] * 3, critic=critic)
    for stage in (annotate, rewards, advantages):
        asyncio.run(stage(step))
    mask = np.concatenate([sample.segment.loss_mask for sample in step.flat])
    spread = np.concatenate([sample.streams[VALUES] for sample in step.flat])[mask].std(axis=1)
    advantage = np.concatenate([sample.advantages for sample in step.flat])[mask]
    entropy = np.concatenate([sample.streams[ENTROPY_WEIGHT] for sample in step.flat])[mask]
    order, count = np.argsort(spread), mask.sum()
    assert set(np.flatnonzero(advantage == 0)) == set(order[: int(0.3 * count)])
    assert set(np.flatnonzero(entropy == 0)) == set(order[count - int(0.2 * count) :])


@pytest.mark.parametrize("order", [(advantages, update_critics), (update_critics, advantages)])
def test_critics_and_actor_know_the_same_penalty(model_directories, order):
    """The coefficient that is adapted for the next step is not that of this one."""

    class Says(Here):
        async def predict(self, packs):
            return [np.full(len(pack.tokens), -0.5, np.float32) for pack in packs]

        async def step(self, batch):
            return {}

    kl = {"coefficient": 0.3, "place": "reward", "target": 1.0, "horizon": 8, "estimator": "k1"}
    critic, algorithm = CriticConfig(), AlgorithmConfig.model_validate({"recipe": "ppo", "kl": kl})
    step = step_of(model_directories["llama"], algorithm, critics=[Says(None)], critic=critic)
    step.pipeline.reference = Says(None)
    step.pipeline.algorithm_state.kl = 0.1
    step = Step(number=2, version=1, samples=step.samples, pipeline=step.pipeline)
    for stage in (annotate, *order):
        asyncio.run(stage(step))
    assert step.metrics["reward/kl_coefficient"] == 0.1 != step.pipeline.algorithm_state.kl
    for sample in step.flat:
        mask = sample.segment.loss_mask
        penalties = -0.1 * (sample.segment.logprobs[mask] + 0.5)
        assert sample.reward == pytest.approx(sample.meta.score.value + penalties.sum())
        penalties[-1] += sample.meta.score.value
        np.testing.assert_allclose(sample.streams[RETURNS][mask], penalties[::-1].cumsum()[::-1], atol=1e-5)


def test_critics_that_say_the_same_mask_nothing(model_directories):
    class Says(Here):
        async def predict(self, packs):
            return [np.zeros(len(pack.tokens), np.float32) for pack in packs]

    step = step_of(
        model_directories["llama"],
        AlgorithmConfig.model_validate({"recipe": "asyppo", "advantage_whiten": False}),
        critics=[Says(None)] * 2,
        critic=CriticConfig(count=2, disjoint=True),
    )
    step.samples = [[replace(sample, reward=1.0) for sample in group] for group in step.samples]
    for stage in (annotate, advantages):
        asyncio.run(stage(step))
    assert all((sample.advantages[sample.segment.loss_mask] == 1).all() for sample in step.flat)
    assert ENTROPY_WEIGHT not in step.flat[0].streams


@pytest.mark.parametrize("asked", [False, True])
def test_what_no_loss_looks_at_is_not_sent(model_directories, asked):
    algorithm = AlgorithmConfig(streams=("values", "proximal_logprobs") if asked else ())
    step = step_of(model_directories["llama"], algorithm, critics=[Here(make_learner(model_directories["llama"]))])
    for stage in (annotate, update_actor):
        asyncio.run(stage(step))
    (pack, *_) = step.batches[0].updates[0].packs[0]
    assert {spec.name for spec in pack.streams} == ({"values", "proximal_logprobs"} if asked else set())


SURPRISE = StreamSpec("surprise")


def undeclared_loss(inputs, config):
    return -inputs.streams[SURPRISE] * inputs.logprobs, {}


reads_surprise = loss(needs=[SURPRISE])(lambda inputs, config: undeclared_loss(inputs, config))


def step_with_own_loss(directory, name, **algorithm):
    step = step_of(directory, AlgorithmConfig(loss=f"{__name__}:{name}", **algorithm))
    step.add_stream(SURPRISE, {key: np.ones(9, np.float32) for key in by_key(step.samples)})
    return step


@pytest.mark.parametrize(
    ("name", "algorithm"), [("reads_surprise", {}), ("undeclared_loss", {"streams": (f"{__name__}:SURPRISE",)})]
)
def test_the_learner_gets_the_streams_that_a_loss_reads(model_directories, name, algorithm):
    step = step_with_own_loss(model_directories["llama"], name, **algorithm)
    asyncio.run(update_actor(step))
    (pack, *_) = step.batches[0].updates[0].packs[0]
    assert {spec.name for spec in pack.streams} == {"surprise"}


def test_a_loss_that_declares_nothing_gets_no_streams(model_directories):
    step = step_with_own_loss(model_directories["llama"], "undeclared_loss")
    with pytest.raises(ConfigError) as error:
        asyncio.run(update_actor(step))
    assert (error.value.key, error.value.value) == ("algorithm.loss", "surprise")


def test_a_declared_stream_that_a_sample_lacks_is_named(model_directories):
    """Nobody can tell before the first step whether an engine returns what its user says."""
    step = step_with_own_loss(model_directories["llama"], "reads_surprise")
    lacking = step.samples[1][0]
    step.samples[1][0] = replace(lacking, streams=lacking.streams.without([SURPRISE]))
    with pytest.raises(ConfigError) as error:
        asyncio.run(update_actor(step))
    assert (error.value.key, error.value.value) == ("algorithm.loss", f"{__name__}:reads_surprise")


def test_the_divergence_in_rewards_is_not_sent(model_directories):
    kl = {"coefficient": 0.3, "place": "reward"}
    step = step_of(model_directories["llama"], AlgorithmConfig(advantage="reinforce", kl=kl))
    step.pipeline.reference = Here(make_learner(model_directories["llama"]))
    for stage in (annotate, rewards, advantages):
        asyncio.run(stage(step))
    assert all({"kl_reward", "reference_logprobs"} <= {spec.name for spec in sample.streams} for sample in step.flat)
    asyncio.run(update_actor(step))
    assert not any(pack.streams for pack in step.batches[0].updates[0].packs[0])


def test_each_task_has_its_teachers(model_directories):
    """The mean of those of its task, each with its weight; what nobody teaches is left as it is."""

    class Says(Here):
        async def predict(self, packs):
            return [np.full(len(pack.tokens), self.learner, np.float32) for pack in packs]

    teachers = [
        (TeacherConfig(path="a", tasks=("test",)), Says(-1.0)),
        (TeacherConfig(path="b", tasks=("sums", "test"), weight=0.5), Says(-2.0)),
        (TeacherConfig(path="c", tasks=("ignored",), weight=0.0), Says(-3.0)),
    ]
    algorithm = AlgorithmConfig.model_validate("opd")
    step = step_of(model_directories["llama"], algorithm, teachers=teachers)
    tasks = ["test", "sums", "nobody's", "ignored"]
    step.samples = [
        [replace(sample, meta=replace(sample.meta, task=task)) for sample in group]
        for group, task in zip(step.samples, tasks, strict=True)
    ]
    for stage in (annotate, rewards, advantages):
        asyncio.run(stage(step))
    for group, taught in zip(step.samples, ([(1.0, -1.0), (0.5, -2.0)], [(0.5, -2.0)], [], []), strict=True):
        for sample in group:
            mask = sample.segment.loss_mask & (np.arange(9) > 0)
            own = sample.segment.logprobs[mask]
            wanted = sum((weight * (said - own) for weight, said in taught), 0 * own) / max(len(taught), 1)
            np.testing.assert_allclose(sample.advantages[mask], wanted, atol=1e-6)


class Starts:
    """A learner that is told how many updates it will make."""

    async def begin(self, algorithm, optimizer, total_updates):
        self.total = total_updates
        return 0


def test_the_actors_schedule_is_of_the_steps_in_which_it_learns(model_directories):
    """While critics are warmed up it makes no updates: its rate is at its end when the run is, and not before."""
    learner = Starts()
    optimizer = OptimizerConfig(schedule="linear", warmup_steps=0, final_ratio=0.0)
    config = LearnerConfig(optimizer=optimizer, minibatches=3)
    asyncio.run(ModelRoles(learner=learner).begin(AlgorithmConfig(), config, CriticConfig(warmup_steps=2), steps=7))
    rates = [learning_rate_factor(optimizer, done, learner.total) for done in (14, 15)]
    assert rates[0] > 0 == rates[1], "15 updates are made: 3 in each of 5 steps"
