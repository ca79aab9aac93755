"""Routing replay in the learner, against transformers' own layers with the same experts."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.registry import LOSSES, built_in_declaration
from antiphon.algorithms.routing import balance_loss
from antiphon.algorithms.sections import RhythmConfig
from antiphon.core.types import ATTENTION_RHYTHM, ROUTED_EXPERTS, AttemptId
from antiphon.learning.batch import BatchOptions, build_batch
from antiphon.learning.config import OptimizerConfig
from antiphon.learning.packing import pack_samples, split_packs
from antiphon.learning.stages import annotate

from .conftest import SHAPE, make_learner, make_sample
from .test_attention_stats import maps_of, written_out
from .test_stages import step_of

LAYERS, EXPERTS, CHOSEN = 4, 6, 2
SPEC = ROUTED_EXPERTS
WIDE = RhythmConfig(kind="coupled", window=4, horizon_low=1, horizon_high=9)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    torch.set_num_threads(1)
    torch.manual_seed(13)
    directory = tmp_path_factory.mktemp("mixture")
    shape = {**SHAPE, "num_hidden_layers": LAYERS, "initializer_range": 0.3}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 32}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, head_dim=8)).save_pretrained(directory)
    return directory


def recorded_groups() -> list[list]:
    """Groups of two siblings that share a prompt, all tokens of which were sampled by experts at random: also the first of
    each, that came from the last token of the prompt."""
    rng, groups = np.random.default_rng(2), []
    for group in range(3):
        prompt = rng.integers(0, 31, 5 + group).astype(np.int32)
        groups.append([])
        for sibling in range(2):
            sample = make_sample(rng, 16, AttemptId(group, sibling, 0))
            mask = np.arange(16) >= len(prompt)
            tokens = np.concatenate([prompt, sample.segment.tokens[len(prompt) :]])
            tokens[len(prompt)] = sibling  # where siblings part
            turns = (replace(sample.segment.turns[0], start=len(prompt)),)
            segment = replace(sample.segment, tokens=tokens, loss_mask=mask, turns=turns)
            experts = np.argsort(rng.random((16, LAYERS, EXPERTS)))[..., :CHOSEN] + 1
            experts[~mask] = 0
            streams = sample.streams.with_stream(SPEC, experts.astype(SPEC.dtype))
            groups[-1].append(replace(sample, segment=segment, streams=streams))
    return groups


def routed(directory, group, sample):
    """The model of transformers whose tokens go to the experts that the next was sampled by; the last of the prompt, which is
    computed once for all siblings, to those of the first sibling."""
    taken = torch.from_numpy(sample.streams[SPEC].astype(np.int64))
    start = int(sample.segment.loss_mask.argmax())
    taken[start] = torch.from_numpy(group[0].streams[SPEC][start].astype(np.int64))
    taken = torch.cat([taken[1:], torch.zeros_like(taken[:1])]) - 1
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    for number, layer in enumerate(model.model.layers):

        def choose(gate, given, said, number=number):
            logits, _, own = said
            chosen = own.where(taken[:, number] < 0, taken[:, number])
            weights = logits.softmax(-1).gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, chosen

        layer.mlp.gate.register_forward_hook(choose)
    return model


class WritesOnce(TorchDispatchMode):
    """Sees what is put at indices, which is to be at each once: on a GPU any of several may be the last."""

    seen = 0

    def __torch_dispatch__(self, operation, types, args=(), options=None):
        if operation in (torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default):
            (places,) = args[1]
            assert len(places.unique()) == len(places)
            self.seen += 1
        return operation(*args, **options or {})


def test_siblings_take_the_firsts_experts_at_the_prompts_end(mixture):
    groups = recorded_groups()
    samples = [sample for group in groups for sample in group]
    members, packs = pack_samples(samples, 400, (ROUTED_EXPERTS,))
    assert len(packs) == 1 and len(packs[0].tokens) < 6 * 16, "prompts are shared"
    with WritesOnce() as writes:
        said = split_packs(samples, members, make_learner(mixture).predict(packs))
    assert writes.seen
    for own, sample in zip(said, samples, strict=True):
        tokens, mask = torch.from_numpy(sample.segment.tokens).long(), sample.segment.loss_mask
        with torch.no_grad():
            logits = routed(mixture, groups[sample.meta.id.group], sample)(tokens[None]).logits[0]
        wanted = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(own[mask], wanted[mask[1:]], rtol=1e-4, atol=1e-5)


def test_attention_is_read_under_the_replayed_experts(mixture):
    step = step_of(mixture, AlgorithmConfig(rhythm=WIDE))
    step.samples = groups = recorded_groups()
    asyncio.run(annotate(step))
    for group, annotated in zip(groups, step.samples, strict=True):
        for sample, found in zip(group, annotated, strict=True):
            segment = sample.segment
            maps = maps_of(routed(mixture, group, sample), segment.tokens, [1, 2])  # of four layers the middle third
            wanted = written_out(maps, segment.loss_mask, WIDE)
            np.testing.assert_allclose(found.streams[ATTENTION_RHYTHM], wanted, rtol=1e-4, atol=1e-5)


def test_the_balance_of_experts_is_a_mean_over_sequences(mixture):
    """So many copies of a sequence have the loss and gradient of one; nothing else moves samples without advantage."""
    learner = make_learner(mixture)
    sample = make_sample(np.random.default_rng(3), 16, AttemptId(0, 0, 0))
    sample = replace(sample, advantages=np.zeros_like(sample.advantages))

    def step(copies: int, balance: float) -> dict[str, float]:
        learner.begin(AlgorithmConfig(expert_balance=balance), OptimizerConfig(learning_rate=1e-12), 1)
        how = {"aggregation": "token_mean", "max_tokens": 16, "tokens_per_pack": 24}
        return learner.step(build_batch([[sample]] * copies, BatchOptions(**how)))

    one, three = step(1, 0.5), step(3, 0.5)
    assert one["grad_norm"] > 0 == step(1, 0.0)["grad_norm"]
    assert [three["grad_norm"], step(1, 1.0)["grad_norm"]] == pytest.approx(
        [one["grad_norm"], 2 * one["grad_norm"]], rel=1e-4
    )
    assert three["expert_balance"] == pytest.approx(one["expert_balance"], rel=1e-4)
    assert one["expert_balance"] >= 1 - 1e-6  # 1 if experts are used alike


def test_no_balance_is_kept_of_a_pass_without_gradient(mixture):
    learner = make_learner(mixture)
    learner.begin(AlgorithmConfig(expert_balance=0.5), OptimizerConfig(), 1)
    _, packs = pack_samples([make_sample(np.random.default_rng(3), 16, AttemptId(0, 0, 0))], 24)
    learner.predict(packs)
    assert not learner._balances


def test_samples_without_advantage_count_for_the_balance():
    needs_none = built_in_declaration(LOSSES, "ppo_clip")
    assert AlgorithmConfig().skips_zero_advantage(needs_none)
    assert not AlgorithmConfig(expert_balance=0.1).skips_zero_advantage(needs_none)


@pytest.mark.parametrize("scores", [torch.zeros(4, 3), torch.full((4, 3), -2.0), torch.full((4, 3), 0.5)])
def test_even_scores_are_balanced_or_say_nothing(scores):
    loss = balance_loss(scores.bfloat16(), torch.eye(3)[[0, 1, 2, 0]], torch.ones(1, 4))
    assert loss.dtype == torch.float32 and loss.isfinite() and loss <= 1 + 1e-6
