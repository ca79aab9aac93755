"""Penalties in the native engine: those of transformers' processors, and of the definitions of presence and frequency."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from antiphon.core.types import GenerateRequest, OnUpdate, Sampling
from antiphon.engines.native import engine as engine_module
from antiphon.engines.native.penalties import adjust_scores
from antiphon.engines.native.slots import SlotTable
from tests.unit.engines.native_support import VOCABULARY, make_host, prompt

PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": -0.3}


def penalize(logits, tokens, start, sampling):
    """Logits [V] after `tokens`, of which those from `start` on are the completion; token by token."""
    history = torch.tensor([tokens])
    logits = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(
        history, torch.from_numpy(logits)[None].float()
    )
    logits = logits[0].double().numpy()
    for token in set(tokens[start:]):
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * tokens[start:].count(token)
    return logits


def expected_logprobs(host, name):
    """Log-probs of a request's tokens, from a plain forward of transformers under each token's version."""
    request, drawn = host.requests[name], host.tokens(name)
    tokens = [*request.tokens.tolist(), *drawn]
    versions, first, start = host._joined(name, "versions"), len(request.tokens), len(request.tokens) - request.sampled
    found = []
    for at, (token, version) in enumerate(zip(drawn, versions.tolist(), strict=True), first):
        raw = host.logits(version, np.array(tokens))[at - 1]
        logits = penalize(raw, tokens[:at], start, request.sampling) / (request.sampling.temperature or 1.0)
        found.append(logits[token] - np.logaddexp.reduce(logits))
    return np.array(found)


def add_requests(host, **sampling):
    for number in range(10):
        chosen = PENALTIES if number % 2 else {}
        host.add(
            f"r{number}", prompt(number // 3, 5 + number // 3), max_tokens=25, seed=number, **{**chosen, **sampling}
        )


@pytest.mark.parametrize("mode", [None, OnUpdate.RECOMPUTE, OnUpdate.RESTART])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_of_the_penalized_distribution(mode, temperature):
    """Beside requests without penalties, whose log-probs are the plain ones; also across an update of the weights."""
    host = make_host(slots=6)
    add_requests(host, temperature=temperature)
    host.step(12)
    if mode is not None:
        host.publish(1, mode)
    host.run()
    for name in host.requests:
        np.testing.assert_allclose(host._joined(name, "logprobs"), expected_logprobs(host, name), atol=1e-4)


@pytest.mark.parametrize("penalty", [1.2, 3.0, 0.7])
def test_greedy_tokens_are_those_of_transformers(penalty):
    host = make_host("qwen3")
    for number in range(8):
        host.add(f"r{number}", prompt(number, 4 + number), max_tokens=30, temperature=0.0, repetition_penalty=penalty)
    host.run()
    for name, request in host.requests.items():
        tokens = torch.from_numpy(request.tokens.astype(np.int64))[None]
        generated = host.reference.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=30,
            repetition_penalty=penalty,
        )
        assert host.tokens(name) == generated[0, tokens.shape[1] :].tolist()


@given(
    seed=st.integers(0, 1000),
    repetition=st.floats(0.3, 3),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    sampled=st.integers(0, 12),
)
@settings(max_examples=40)
def test_a_row_of_logits(seed, repetition, presence, frequency, sampled):
    """Tokens that another engine has sampled count as output; the row beside it stays as it is, bit by bit."""
    rng = np.random.default_rng(seed)
    table = SlotTable(3, 40)
    penalties = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    requests = [
        GenerateRequest(
            id=str(number),
            tokens=rng.integers(0, 9, 12 + number).astype(np.int32),
            sampling=Sampling(max_tokens=20, **(penalties if number == 1 else {})),
            sampled=sampled if number == 1 else 0,
        )
        for number in range(3)
    ]
    slots = np.array([table.admit(request, 0) for request in requests])
    table.tokens[slots, table.length[slots]] = rng.integers(0, 9, 3)
    table.length[slots] += 1
    logits = torch.from_numpy(rng.normal(0, 3, (3, VOCABULARY)).astype(np.float32))
    found = adjust_scores(logits.clone(), table, slots, table.length[slots])
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    tokens = table.tokens[slots[1], :14].tolist()
    expected = penalize(logits[1].numpy(), tokens, 13 - sampled, requests[1].sampling)
    np.testing.assert_allclose(found[1].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_requests_without_penalties_are_left_alone(monkeypatch):
    """Without any penalty the very logits of the model are sampled from; beside one, tokens and log-probs are the same bits."""

    def untouched(logits, *args):
        before = logits.clone()
        found = adjust_scores(logits, *args)
        assert found is logits and torch.equal(found, before)
        return found

    outcomes = []
    for penalties, adjust in (({}, untouched), (PENALTIES, adjust_scores)):
        monkeypatch.setattr(engine_module, "adjust_scores", adjust)
        host = make_host(slots=12)
        for number in range(6):
            host.add(f"plain {number}", prompt(number, 9), max_tokens=20, seed=number, top_k=7 * (number % 2))
            host.add(f"other {number}", prompt(number, 9), max_tokens=20, seed=number, **penalties)
        host.run()
        outcomes.append(
            [(host.tokens(n), host._joined(n, "logprobs").tobytes()) for n in host.requests if "plain" in n]
        )
        others = [host.tokens(name) for name in host.requests if "other" in name]
    assert outcomes[0] == outcomes[1]
    assert others != [tokens for tokens, _ in outcomes[0]]


def test_a_slot_that_is_used_again_forgets_its_penalties():
    host = make_host(slots=1)
    for number, penalties in enumerate(itertools.islice(itertools.cycle([PENALTIES, {}]), 4)):
        host.add(f"r{number}", prompt(3, 9), max_tokens=20, seed=1, **penalties)
    host.run()
    assert host.tokens("r0") == host.tokens("r2") != host.tokens("r1") == host.tokens("r3")
