"""A gradient does not depend on how the samples of an update were cut into micro-batches, ordered or padded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.types import Sample
from antiphon.learning.batch import BatchOptions, build_batch
from antiphon.learning.config import OptimizerConfig

from .conftest import MODELS, histories, make_learner, make_sample

AGGREGATIONS = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"]
MAX_TOKENS = 40


def siblings(rng: np.random.Generator, count: int) -> list[Sample]:
    """Samples that share a prompt of 12 tokens; the first answers with nothing but its end."""
    prompt = rng.integers(0, 31, 12).astype(np.int32)
    found = []
    for number in range(count):
        sample = make_sample(rng, 13 + 5 * number, 100 + number)
        mask = np.arange(len(sample.segment.tokens)) >= 12
        tokens = np.concatenate([prompt, sample.segment.tokens[12:]])
        logprobs = np.where(mask, -rng.random(len(mask)), 0).astype(np.float32)
        turns = (replace(sample.segment.turns[0], start=12),)
        segment = replace(sample.segment, tokens=tokens, loss_mask=mask, logprobs=logprobs, turns=turns)
        found.append(replace(sample, segment=segment, advantages=np.where(mask, rng.normal(), 0).astype(np.float32)))
    return found


def gradient_of(
    learner, samples: list[Sample], algorithm: AlgorithmConfig, tokens_per_pack: int, share: bool = True
) -> torch.Tensor:
    """The flat gradient of one update on these samples, one group each, before clipping."""
    learner.begin(algorithm, OptimizerConfig(), 1)
    batch = build_batch(
        [[sample] for sample in samples],
        BatchOptions(
            aggregation=algorithm.aggregation,
            max_tokens=MAX_TOKENS,
            tokens_per_pack=tokens_per_pack,
            share_prefixes=share,
        ),
    )
    learner.model.zero_grad()
    for pack in batch.updates[0].packs[0]:
        learner._backward(pack)
    return torch.cat([p.grad.flatten() for p in learner.model.parameters()]).clone()


def reference_gradient(directory, samples: list[Sample], algorithm: AlgorithmConfig, padding: int) -> torch.Tensor:
    """The same by a plain padded forward of transformers and formulas written out."""
    model = in_double(AutoModelForCausalLM.from_pretrained(directory))
    width = max(len(s.segment.tokens) for s in samples) + padding
    tokens = torch.zeros(len(samples), width, dtype=torch.long)
    attention = torch.zeros(len(samples), width, dtype=torch.long)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.segment.tokens)] = torch.from_numpy(sample.segment.tokens)
        attention[row, : len(sample.segment.tokens)] = 1
    logits = model(tokens, attention_mask=attention).logits
    losses, counts = [], []
    for row, sample in enumerate(samples):
        segment, total = sample.segment, 0.0
        temperature = segment.turns[0].sampling.temperature
        for position in range(1, len(segment.tokens)):
            if not segment.loss_mask[position]:
                continue
            distribution = torch.softmax(logits[row, position - 1] / temperature, -1)
            logprob = distribution[segment.tokens[position]].log()
            ratio = torch.exp(logprob - float(segment.logprobs[position]))
            advantage = float(sample.advantages[position])
            bounded = min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
            loss = -min(ratio * advantage, bounded * advantage)
            loss = loss + algorithm.entropy_coefficient * (distribution * distribution.log()).sum()
            total = total + loss
        losses.append(total)
        counts.append(int(segment.loss_mask[1:].sum()))
    match algorithm.aggregation:
        case "token_mean":
            loss = sum(losses) / sum(counts)
        case "sequence_mean_token_mean":
            loss = sum(loss / count for loss, count in zip(losses, counts, strict=True)) / len(losses)
        case "sequence_mean_token_sum":
            loss = sum(losses) / len(losses)
        case "sequence_mean_token_sum_norm":
            loss = sum(losses) / len(losses) / MAX_TOKENS
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def in_double(model: torch.nn.Module) -> torch.nn.Module:
    """The model in double precision throughout: transformers' own norm would round to single on the way."""
    model.to(torch.float64)
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, norm)
    return model


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_micro_batches_and_order_do_not_change_it(model_directories, dtype, tolerance, data):
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    lengths = data.draw(st.lists(st.integers(2, 40), min_size=2, max_size=9))
    samples = [
        make_sample(rng, length, i, temperature=float(rng.choice([0.75, 1.0]))) for i, length in enumerate(lengths)
    ]
    samples += siblings(rng, data.draw(st.integers(0, 4))) + histories(rng, data.draw(st.integers(0, 8)))
    algorithm = AlgorithmConfig(
        aggregation=data.draw(st.sampled_from(AGGREGATIONS)),
        entropy_coefficient=0.01,
        ratio_level=data.draw(st.sampled_from(["token", "turn", "sequence"])),
    )
    chunk = data.draw(st.sampled_from([3, 17, 4096]))
    learner = make_learner(model_directories["llama"], logits_chunk=chunk)
    if dtype is torch.float64:
        in_double(learner.model)
    whole = gradient_of(learner, samples, algorithm, 10**6)
    order = data.draw(st.permutations(range(len(samples))))
    budget = data.draw(st.integers(1, 100))
    share = data.draw(st.booleans())  # whether what samples begin with alike is computed once
    cut = gradient_of(learner, [samples[i] for i in order], algorithm, budget, share)
    assert relative(cut, whole) < tolerance


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_it_is_that_of_a_padded_forward(model_directories, kind, aggregation):
    rng = np.random.default_rng(3)
    samples = [
        make_sample(rng, length, i, temperature=[1.0, 0.75][i % 2]) for i, length in enumerate((40, 2, 9, 17, 5))
    ]
    samples += siblings(rng, 4) + histories(rng, 6)
    algorithm = AlgorithmConfig(aggregation=aggregation, entropy_coefficient=0.02)
    learner = make_learner(model_directories[kind])
    in_double(learner.model)
    packed = gradient_of(learner, samples, algorithm, 48)
    for padding in (0, 11):
        padded = reference_gradient(model_directories[kind], samples, algorithm, padding)
        assert relative(packed, padded) < 1e-10


def test_skipping_zero_advantages_keeps_the_gradient(model_directories):
    rng = np.random.default_rng(5)
    samples = [make_sample(rng, 12, i) for i in range(6)]
    for sample in samples[::2]:
        sample.advantages[:] = 0
    learner = make_learner(model_directories["llama"])
    in_double(learner.model)
    whole = gradient_of(learner, samples, AlgorithmConfig(), 10**6)
    batch = build_batch(
        [[s] for s in samples],
        BatchOptions(aggregation="token_mean", max_tokens=1, tokens_per_pack=64, skip_zero_advantage=True),
    )
    learner.model.zero_grad()
    assert sum(len(pack.ends) for pack in batch.updates[0].packs[0]) == 3
    for pack in batch.updates[0].packs[0]:
        learner._backward(pack)
    skipped = torch.cat([p.grad.flatten() for p in learner.model.parameters()])
    assert relative(skipped, whole) < 1e-10


def test_gradient_checkpointing_does_not_change_it(model_directories):
    rng = np.random.default_rng(6)
    samples = [make_sample(rng, int(n), i) for i, n in enumerate(rng.integers(2, 30, 8))]
    plain = gradient_of(make_learner(model_directories["llama"]), samples, AlgorithmConfig(), 64)
    saved = gradient_of(
        make_learner(model_directories["llama"], gradient_checkpointing=True), samples, AlgorithmConfig(), 64
    )
    assert relative(saved, plain) < 1e-5
