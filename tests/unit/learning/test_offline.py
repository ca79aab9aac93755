"""Learners of pairs and of a teacher: their gradients are those of plain forwards of transformers, however packs are cut."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.distillation_losses import DIVERGENCES
from antiphon.algorithms.offline_config import DistillationConfig, PreferenceConfig
from antiphon.core.registry import import_path
from antiphon.core.types import PAIR, REFERENCE_LOGPROBS, TrainBatch
from antiphon.learning.config import LearnerConfig, LoraConfig, OptimizerConfig
from antiphon.learning.data_samples import (
    make_pair,
    make_response,
    make_scored_pair,
    make_text,
    pair_mean_batch,
    token_mean_batch,
)
from antiphon.learning.objectives.distill import DistillationLearner, Teacher
from antiphon.learning.objectives.pairs import PreferenceLearner, RewardLearner
from antiphon.offline.run import Offline

from .conftest import VOCABULARY
from .test_gradient import in_double, relative

LOSSES = [
    PreferenceConfig(beta=0.3),
    PreferenceConfig(beta=0.3, label_smoothing=0.2),
    PreferenceConfig(loss="ipo", beta=0.3),
]


def texts(rng, lengths):
    """Prompts that some rows share, and two responses each; tokens and their lengths."""
    prompts = [rng.integers(0, VOCABULARY, size).astype(np.int32) for size in (1, 6)]
    return [
        (prompts[number % 2], *(rng.integers(0, VOCABULARY, length).astype(np.int32) for length in row))
        for number, row in enumerate(lengths)
    ]


def referenced(groups, rng):
    """With a reference's log-probs, drawn."""
    return [
        [
            replace(
                sample,
                streams=sample.streams.with_stream(
                    REFERENCE_LOGPROBS, (-4 * rng.random(len(sample.advantages))).astype(np.float32)
                ),
            )
            for sample in group
        ]
        for group in groups
    ]


def gradient_of(learner, batch: TrainBatch) -> tuple[float, torch.Tensor]:
    """The loss and the flat gradient of one update, before clipping."""
    learner.begin(AlgorithmConfig(), OptimizerConfig(), 1)
    learner.model.zero_grad()
    (update,) = batch.updates
    loss = float(sum(learner._backward(pack)["loss"] for rank in update.packs for pack in rank))
    return loss, flat(learner.model)


MEASURES = ("reward_chosen", "reward_rejected", "margin", "accuracy", "tokens")


def flat(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()


def of_tokens(model, prompt, response) -> torch.Tensor:
    """Log-probs of the next token at every token of the response [C, V], by transformers."""
    tokens = torch.from_numpy(np.concatenate([prompt, response])).long()
    return model(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def preferred(model, rows, groups, config) -> torch.Tensor:
    """The loss of DPO or IPO as their papers write it, by a forward of each sequence."""
    losses = []
    for (prompt, *responses), group in zip(rows, groups, strict=True):
        apart = []
        for response, sample in zip(responses, group, strict=True):
            said = of_tokens(model, prompt, response)[torch.arange(len(response)), torch.from_numpy(response).long()]
            reference = torch.from_numpy(sample.streams[REFERENCE_LOGPROBS][len(prompt) :])
            apart.append((said - reference).sum() / (len(response) if config.loss == "ipo" else 1))
        margin = apart[0] - apart[1]
        if config.loss == "ipo":
            losses.append((margin - 1 / (2 * config.beta)) ** 2)
        else:
            right = torch.sigmoid(config.beta * margin)
            losses.append(-(1 - config.label_smoothing) * right.log() - config.label_smoothing * (1 - right).log())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("config", LOSSES, ids=lambda config: f"{config.loss} {config.label_smoothing}")
@pytest.mark.parametrize("kind", ["llama", "tied llama", "qwen3"])
def test_preference_is_that_of_plain_forwards(model_directories, kind, config):
    rng = np.random.default_rng(1)
    rows = texts(rng, [(1, 9), (4, 1), (1, 1), (12, 3), (5, 5)])
    groups = referenced([make_pair(number, *row) for number, row in enumerate(rows)], rng)
    learner = PreferenceLearner(str(model_directories[kind]), LearnerConfig(), 0, config)
    in_double(learner.model)
    loss, gradient = gradient_of(learner, pair_mean_batch(groups, 30))
    plain = in_double(AutoModelForCausalLM.from_pretrained(model_directories[kind]))
    want = preferred(plain, rows, groups, config)
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-9)
    assert relative(gradient, flat(plain)) < 1e-9


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_measures_of_pairs_are_those_of_plain_forwards(model_directories, kind):
    """Rewards are beta times the log ratio to the reference; `ipo` takes it by token."""
    rng = np.random.default_rng(4)
    rows, config = texts(rng, [(1, 9), (4, 1), (12, 3)]), PreferenceConfig(loss=kind, beta=0.3)
    groups = referenced([make_pair(number, *row) for number, row in enumerate(rows)], rng)
    learner = PreferenceLearner(str(model_directories["llama"]), LearnerConfig(), 0, config)
    in_double(learner.model)
    (update,) = pair_mean_batch(groups, 30).updates
    packs = [pack for of_rank in update.packs for pack in of_rank]
    found = [sum(said[name] for said in learner.measure(packs)) for name in MEASURES]
    plain, rewards = in_double(AutoModelForCausalLM.from_pretrained(model_directories["llama"])), []
    for (prompt, *responses), group in zip(rows, groups, strict=True):
        for response, sample in zip(responses, group, strict=True):
            said = of_tokens(plain, prompt, response)[torch.arange(len(response)), torch.from_numpy(response).long()]
            ratios = (said - torch.from_numpy(sample.streams[REFERENCE_LOGPROBS][len(prompt) :])).detach()
            rewards.append(0.3 * float(ratios.mean() if kind == "ipo" else ratios.sum()))
    chosen, rejected = np.array(rewards[::2]), np.array(rewards[1::2])
    want = [chosen.sum(), rejected.sum(), (chosen - rejected).sum(), (chosen > rejected).sum(), len(rows)]
    assert found == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_reward_is_that_of_plain_forwards(model_directories, kind, tmp_path):
    rng = np.random.default_rng(2)
    rows = texts(rng, [(1, 9), (4, 1), (1, 1), (12, 3)])
    learner = RewardLearner(str(model_directories[kind]), LearnerConfig(), 0)
    learner.model.save_pretrained(tmp_path)
    in_double(learner.model)
    loss, gradient = gradient_of(
        learner, pair_mean_batch([make_scored_pair(n, *row) for n, row in enumerate(rows)], 30)
    )
    plain = in_double(AutoModelForSequenceClassification.from_pretrained(tmp_path))

    def score(prompt, response):
        return plain(torch.from_numpy(np.concatenate([prompt, response]))[None].long()).logits[0, 0]

    want = -sum(F.logsigmoid(score(p, chosen) - score(p, rejected)) for p, chosen, rejected in rows) / len(rows)
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-9)
    assert relative(gradient, flat(plain)) < 1e-9


def test_a_reward_model_does_not_take_the_end_for_padding(model_directories, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_directories["llama"])
    model.config.pad_token_id = model.config.eos_token_id = 2
    model.save_pretrained(tmp_path / "model")
    learner = RewardLearner(str(tmp_path / "model"), LearnerConfig(), 0)
    learner.model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    prompt, response = np.array([5, 6], np.int32), np.array([7, 2], np.int32)
    ((pack,),) = pair_mean_batch([make_scored_pair(0, prompt, response, response[1:])], 99).updates[0].packs
    scores = learner.predict([pack])[0][pack.loss_mask]
    want = [loaded(torch.tensor([tokens])).logits.item() for tokens in ([5, 6, 7, 2], [5, 6, 2])]
    np.testing.assert_allclose(scores, want, atol=1e-6)


def lessons(teacher, rows, tokens_per_pack):
    """The batch of a student."""
    batch = token_mean_batch(
        [make_response(number, prompt, response) for number, (prompt, response, _) in enumerate(rows)],
        tokens_per_pack,
    )
    (update,) = batch.updates
    (packs,) = update.packs
    taught = ((pack, teacher.teach([pack])[0]) for pack in packs)
    return TrainBatch(updates=(replace(update, packs=(tuple(replace(p, streams=said) for p, said in taught),)),))


@pytest.mark.parametrize("top_k", [0, 1, 5, VOCABULARY])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_distillation_is_that_of_plain_forwards(model_directories, divergence, top_k):
    """... with rows of the heads that stand for no token."""
    vocabulary = VOCABULARY - 2
    config = DistillationConfig(
        teacher="qwen3",
        divergence=divergence,
        skew=0.3,
        student_temperature=1.5,
        teacher_temperature=0.7,
        top_k=top_k,
        sft_weight=0.25,
    )
    rows = [
        (prompt % vocabulary, response % vocabulary, other)
        for prompt, response, other in texts(np.random.default_rng(3), [(1, 1), (9, 1), (4, 1)])
    ]
    places = (str(model_directories[kind]) for kind in ("llama", "qwen3"))
    student, teacher = (
        kind(place, LearnerConfig(logits_chunk=4), 0, config, vocabulary)
        for kind, place in zip((DistillationLearner, Teacher), places, strict=True)
    )
    in_double(student.model)
    batch = lessons(teacher, rows, 12)
    loss, gradient = gradient_of(student, batch)
    agreed = sum(student._loss(pack)[1]["accuracy"].sum().item() for pack in batch.updates[0].packs[0])

    plain = in_double(AutoModelForCausalLM.from_pretrained(model_directories["llama"]))
    other = AutoModelForCausalLM.from_pretrained(model_directories["qwen3"])
    losses, alike = [], 0
    for prompt, response, _ in rows:
        logits = of_tokens(plain, prompt, response)[:, :vocabulary]
        with torch.no_grad():
            p = (of_tokens(other, prompt, response)[:, :vocabulary] / 0.7).softmax(-1).double()
        q = (logits / 1.5).softmax(-1)
        alike += (q.argmax(-1) == p.argmax(-1)).sum().item()
        if top_k and top_k < vocabulary:
            best = p.argsort(-1, descending=True)[:, :top_k]
            p, q = (torch.cat([x.gather(1, best), 1 - x.gather(1, best).sum(1, keepdim=True)], 1) for x in (p, q))
        losses.append(0.75 * DIVERGENCES[divergence](p.log(), q.log(), 0.3))
        losses.append(0.25 * F.cross_entropy(logits, torch.from_numpy(response).long(), reduction="none"))
    want = torch.cat(losses).sum() / sum(len(response) for _, response, _ in rows)
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-4)
    assert relative(gradient, flat(plain)) < 1e-4  # the teacher says it in single precision
    assert agreed == alike, "tokens that both hold most likely"


def test_prompts_may_be_learned_from_too():
    prompt, response = np.int32([1, 2, 3]), np.int32([4, 5])
    (text,), (response_alone,) = (make(0, prompt, response) for make in (make_text, make_response))
    assert np.array_equal(text.segment.tokens, response_alone.segment.tokens)
    (pack,) = token_mean_batch([[text]], 99).updates[0].packs[0]
    assert pack.loss_mask.tolist() == [False, True, True, True, True]
    assert response_alone.segment.loss_mask.tolist() == [False, False, False, True, True]


@settings(max_examples=12)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=8),
    budget=st.integers(1, 60),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_packs_and_order_do_not_change_a_gradient(learners, lengths, budget, seed, data):
    rng = np.random.default_rng(seed)
    rows = texts(rng, lengths)
    order = data.draw(st.permutations(range(len(rows))))
    for learner, batch_of in learners:
        whole = gradient_of(learner, batch_of(rows, range(len(rows)), 10**6, seed))
        cut = gradient_of(learner, batch_of(rows, order, budget, seed))
        assert cut[0] == pytest.approx(whole[0], rel=1e-4)
        assert (cut[1] - whole[1]).norm() <= 1e-4 * whole[1].norm() + 1e-9  # streams are in single precision


@pytest.fixture(scope="module")
def learners(model_directories):
    """Each learner, in double precision."""
    found = make_learners(model_directories, LearnerConfig(logits_chunk=5))
    for learner, _ in found:
        in_double(learner.model)
    return found


def make_learners(model_directories, config):
    """Each learner, with what makes a batch for it of rows in some order."""
    place = str(model_directories["llama"])
    distillation = DistillationConfig(teacher="", divergence="jensen_shannon", top_k=4)
    teacher = Teacher(str(model_directories["qwen2"]), config, 0, distillation, VOCABULARY)

    def pairs(rows, order, budget, seed):
        groups = referenced([make_pair(n, *row) for n, row in enumerate(rows)], np.random.default_rng(seed))
        return pair_mean_batch([groups[i] for i in order], budget)

    def scored(rows, order, budget, seed):
        return pair_mean_batch([make_scored_pair(i, *rows[i]) for i in order], budget)

    def taught(rows, order, budget, seed):
        return lessons(teacher, [rows[i] for i in order], budget)

    return [
        *((PreferenceLearner(place, config, 0, preference), pairs) for preference in LOSSES),
        (RewardLearner(place, config, 0), scored),
        (DistillationLearner(place, config, 0, distillation, VOCABULARY), taught),
    ]


def test_half_precision_and_checkpointing_come_near_it(model_directories):
    rows = texts(np.random.default_rng(6), [(3, 4), (9, 2), (1, 1)])
    plain = make_learners(model_directories, LearnerConfig())
    half = make_learners(model_directories, LearnerConfig(dtype="bfloat16", gradient_checkpointing=True))
    for (learner, batch_of), (other, _) in zip(plain, half, strict=True):
        batch = batch_of(rows, range(3), 20, 0)
        found, near = (gradient_of(each, batch) for each in (learner, other))
        assert near[0] == pytest.approx(found[0], rel=0.05)
        assert relative(near[1], found[1]) < 0.1


def test_a_teacher_gets_no_adapters():
    """It is not trained, and may have none of the layers that the student's adapters are for."""
    spawned, kinds = {}, {}

    def spawn(name, kind, path, settings, *more, place):
        spawned[name], kinds[name] = settings, kind

    run = SimpleNamespace(
        config=SimpleNamespace(learner=LearnerConfig(lora=LoraConfig(rank=2, targets=("mine",))), seed=0),
        cluster=SimpleNamespace(spawn=spawn),
        placement=SimpleNamespace(place=lambda name, rank: None),
        workers=[],
    )
    for name, objective in (("learner", "DistillationLearner"), ("teacher", "Teacher")):
        asyncio.run(Offline.spawn(run, name, objective, Path("model")))
    assert {name: import_path(kind, "learner", "") for name, kind in kinds.items()} == {
        "learner": DistillationLearner,
        "teacher": Teacher,
    }
    assert spawned["teacher"] == spawned["learner"].model_copy(update={"lora": None}) != spawned["learner"]


def test_a_pair_is_never_split(model_directories):
    rows = texts(np.random.default_rng(4), [(3, 4), (9, 2), (1, 1), (7, 7), (2, 8)])
    for budget in (1, 20, 30, 1000):
        ((*packs,),) = pair_mean_batch([make_pair(n, *row) for n, row in enumerate(rows)], budget).updates[0].packs
        whole = [set(pack.streams[PAIR][pack.loss_mask]) for pack in packs]
        assert sum(map(len, whole)) == len(rows)
        for pack, pairs in zip(packs, whole, strict=True):
            assert len(pack.tokens) <= budget or len(pairs) == 1
            prompts = {len(rows[number][0]) for number in pairs}
            assert len(pack.tokens) == sum(prompts) + sum(len(r) for n in pairs for r in rows[n][1:])
            for number in pairs:  # both, and together they count as every pair does
                own = pack.loss_mask & (pack.streams[PAIR] == number)
                assert set(pack.advantages[own]) == {1, -1}
                assert pack.coefficients[own].sum() == pytest.approx(1 / len(rows))


def test_evaluation_reports_as_a_step_and_changes_nothing(learners):
    rows = texts(np.random.default_rng(5), [(3, 4), (9, 2), (1, 1)])
    for learner, batch_of in learners:
        learner.begin(AlgorithmConfig(), OptimizerConfig(learning_rate=1e-3), 2)
        batch = batch_of(rows, range(3), 20, 0)
        before = [p.detach().clone() for p in learner.model.parameters()]
        looked = [[learner.measure([pack])[0] for pack in batch.updates[0].packs[0]] for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
        stepped = learner.step(batch)
        assert looked[0] == looked[1]
        totals = {name: sum(pack[name] for pack in looked[0]) for name in looked[0][0]}
        count, loss = totals.pop("tokens"), totals.pop("loss")
        assert loss == pytest.approx(stepped["loss"])
        assert {name: total / count for name, total in totals.items()} == pytest.approx({n: stepped[n] for n in totals})
        with torch.no_grad():
            for parameter, value in zip(learner.model.parameters(), before, strict=True):
                parameter.copy_(value)
