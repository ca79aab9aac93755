"""What the engine sampled with is what the learner computes: the log-prob of every token, under the version it came from.

Ragged lengths, cancellations, shared prompts and weight updates in mid-flight, through the real weight channel.
"""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.types import (
    MIXED_CACHE,
    SAMPLING_SUPPORT,
    FinishReason,
    GenerateRequest,
    OnUpdate,
    Sampling,
    Streams,
)
from antiphon.engines.config import EngineConfig
from antiphon.engines.native.engine import NativeEngine
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.data_samples import supervised_batch
from antiphon.learning.packing import pack_samples, split_packs
from antiphon.learning.torch_learner import TorchLearner
from antiphon.weights.base import TransferContext
from antiphon.weights.shared_memory import SharedMemory
from tests.parity.samples_for_tests import sample_of

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    torch.manual_seed(11)
    directory = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=61, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=3, **shape)
    ).save_pretrained(directory)
    return str(directory)


def play(model, exchange, mode, **how):
    """Generate 40 requests in 10 groups with three updates on the way; returns them, their deltas, weights by version."""
    rng = np.random.default_rng(5)
    learner = TorchLearner(model, LearnerConfig(), seed=0)
    learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=3e-3), 100)
    engine = NativeEngine(
        model, EngineConfig(slots=12, max_length=120, prefill_tokens=32), receive=SharedMemory.receive
    )
    weights = {0: snapshot(learner)}
    requests = {}
    for number in range(40):
        prompt = np.random.default_rng(number // 4).integers(4, 61, 5 + 3 * (number // 4)).astype(np.int32)
        sampling = Sampling(max_tokens=int(rng.integers(4, 70)), seed=number, **how)
        requests[str(number)] = GenerateRequest(id=str(number), tokens=prompt, sampling=sampling)
        engine.add(requests[str(number)])
    deltas = {key: [] for key in requests}
    for step in range(10_000):
        if not engine.busy:
            break
        if step in (9, 20, 31):
            examples = [(rng.integers(4, 61, 6).astype(np.int32), rng.integers(4, 61, 6).astype(np.int32))] * 4
            learner.step(supervised_batch(examples, 64))
            version = len(weights)
            weights[version] = snapshot(learner)
            engine.load(learner.publish(version, TransferContext(exchange)), mode)
        if step % 13 == 5:
            engine.abort(str(step % 40))
        for delta in engine.step():
            if delta.restarted:
                deltas[delta.request].clear()
            deltas[delta.request].append(delta)
    assert not engine.busy
    return learner, requests, deltas, weights


def snapshot(learner):
    return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}


def learner_logprobs(learner, weights, samples):
    learner.model.load_state_dict(weights)
    members, packs = pack_samples(samples, 200, [SAMPLING_SUPPORT])
    return split_packs(samples, members, learner.predict(packs))


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.7}, {"top_k": 20, "top_p": 0.6, "min_p": 0.01}, {"top_k": 100}], ids=str
)
@pytest.mark.parametrize("mode", list(OnUpdate))
def test_log_probs_agree_token_by_token(model, tmp_path, mode, how):
    learner, requests, deltas, weights = play(model, tmp_path, mode, **how)
    keys = [key for key, found in deltas.items() if sum(len(d.tokens) for d in found)]
    column = {
        name: {key: np.concatenate([getattr(d, name) for d in deltas[key]]) for key in keys}
        for name in ("tokens", "logprobs", "versions")
    }
    flags = {key: Streams.join([d.streams for d in deltas[key]])[MIXED_CACHE] for key in keys}
    samples = [sample_of(requests[key], deltas[key]) for key in keys]
    by_version = {v: dict(zip(keys, learner_logprobs(learner, w, samples), strict=True)) for v, w in weights.items()}
    exact, mixed = [], []
    for key in keys:
        prompt = len(requests[key].tokens)
        for i, (version, is_mixed) in enumerate(zip(column["versions"][key], flags[key], strict=True)):
            error = abs(float(column["logprobs"][key][i]) - float(by_version[int(version)][key][prompt + i]))
            (mixed if is_mixed else exact).append(error)
    assert max(exact) < TOLERANCE
    assert len(exact) > 200 and {d.finish for found in deltas.values() for d in found} >= set(FinishReason) - {None}
    versions = {int(v) for key in keys for v in column["versions"][key]}
    assert len(versions) > (1 if mode is OnUpdate.DRAIN else 2), (
        "updates came in mid-flight; draining skips to the newest"
    )
    assert bool(mixed) == (mode is OnUpdate.KEEP), "only a kept cache is mixed"
    if mixed:
        print(f"kept cache: mean |difference| {np.mean(mixed):.2e} over {len(mixed)} flagged tokens")
        assert max(mixed) > TOLERANCE, "what is flagged really differs"
