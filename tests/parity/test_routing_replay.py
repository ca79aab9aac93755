"""Routing replay from end to end: an engine that rounds, a learner that does not, and the experts that both go by."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.types import ROUTED_EXPERTS, GenerateRequest, Sampling, Streams
from antiphon.engines.config import EngineConfig
from antiphon.engines.native.engine import NativeEngine
from antiphon.learning.batch import BatchOptions, build_batch
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.packing import pack_samples, split_packs
from antiphon.learning.torch_learner import TorchLearner
from tests.parity.samples_for_tests import sample_of

PROMPT, SIBLINGS = 9, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    torch.manual_seed(2)
    directory = tmp_path_factory.mktemp("mixture")
    shape = {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    mixture = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=61, max_position_embeddings=128, eos_token_id=3, **shape, **experts)
    )
    with torch.no_grad():
        for parameter in mixture.parameters():
            if parameter.ndim > 1:
                parameter.mul_(20)  # sharp, so that another expert is another answer
    mixture.save_pretrained(directory)
    return str(directory)


def sampled(model):
    """Groups of siblings from an engine in bfloat16."""
    config = EngineConfig(slots=8, dtype="bfloat16", device="cpu", routed_experts=True)
    engine = NativeEngine(model, config, receive=lambda update: ())
    requests = {}
    for number in range(6 * SIBLINGS):
        prompt = np.random.default_rng(number // SIBLINGS).integers(4, 61, PROMPT).astype(np.int32)
        sampling = Sampling(max_tokens=40, seed=number)
        requests[str(number)] = GenerateRequest(id=str(number), tokens=prompt, sampling=sampling)
        engine.add(requests[str(number)])
    deltas = {name: [] for name in requests}
    while engine.busy:
        for delta in engine.step():
            deltas[delta.request].append(delta)
    samples = [sample_of(requests[name], found, (-1.0) ** int(name)) for name, found in deltas.items()]
    return [samples[start : start + SIBLINGS] for start in range(0, len(samples), SIBLINGS)]


def mismatch(learner, samples, streams):
    members, packs = pack_samples(samples, 300, streams)
    said = split_packs(samples, members, learner.predict(packs))
    return np.mean(
        [np.abs(own - s.segment.logprobs)[s.segment.loss_mask].mean() for own, s in zip(said, samples, strict=True)]
    )


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_a_learner_that_replays_agrees_with_the_engine(model, options):
    groups = sampled(model)
    samples = [sample for group in groups for sample in group]
    learner = TorchLearner(model, LearnerConfig(**options), seed=0)
    replayed, routed_anew = mismatch(learner, samples, (ROUTED_EXPERTS,)), mismatch(learner, samples, ())
    assert replayed < 0.7 * routed_anew, (replayed, routed_anew)

    learner.begin(AlgorithmConfig(), OptimizerConfig(learning_rate=1e-4), 10)
    batch = build_batch(groups, BatchOptions(aggregation="token_mean", max_tokens=40, tokens_per_pack=300))
    bare = [[replace(sample, streams=Streams()) for sample in group] for group in groups]
    told = learner.step(batch)
    again = TorchLearner(model, LearnerConfig(**options), seed=0)
    again.begin(AlgorithmConfig(), OptimizerConfig(learning_rate=1e-4), 10)
    untold = again.step(build_batch(bare, BatchOptions(aggregation="token_mean", max_tokens=40, tokens_per_pack=300)))
    assert told["mismatch_kl"] < untold["mismatch_kl"]
