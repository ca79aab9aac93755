"""Beam search on the native engine: the sequences and scores of transformers."""

import asyncio
import copy
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor

from antiphon.core.errors import RequestError, UnsupportedError
from antiphon.core.types import Completion, FinishReason, GenerateRequest, Sampling
from antiphon.engines.config import EngineConfig
from antiphon.engines.deltas import Delta
from antiphon.engines.native.engine import NativeEngine
from antiphon.rollout.beam_search import search_beams
from tests.raising import raises_with
from tests.unit.engines.native_support import make_model, prompt

NEW = 12
MANY, MOST = tuple(range(1, 20)), tuple(range(1, 60))  # end tokens


class Characters:
    """A tokenizer whose tokens are one character each."""

    def decode(self, tokens):
        return "".join(chr(33 + token) for token in tokens)


class Engine:
    """A native engine as the pool offers it, and the transformers model that it was made of."""

    def __init__(self, family, ends=None, **config):
        self.reference = make_model(family)
        self.reference.generation_config.eos_token_id = ends
        config = EngineConfig(**{"slots": 6, "device": "cpu", **config})
        model = copy.deepcopy(self.reference)
        self.core = NativeEngine(model, config, receive=lambda update: (), tokenizer=Characters())
        self.requests = []
        self._deltas = {}

    async def generate(self, request):
        self.requests.append(request)
        self.core.add(request)
        found = self._deltas.setdefault(request.id, [])
        while not (found and found[-1].is_last):
            for delta in self.core.step():
                self._deltas.setdefault(delta.request, []).append(delta)
            await asyncio.sleep(0)
        whole = Delta.join(self._deltas.pop(request.id))
        arrays = {"tokens": whole.tokens, "logprobs": whole.logprobs, "versions": whole.versions}
        return Completion(**arrays, finish=whole.finish, streams=whole.streams, engines=(3,))

    def search(self, tokens, **sampling):
        settings = {"max_tokens": NEW, "temperature": 0.0, **sampling}
        request = GenerateRequest(id="r", tokens=np.array(tokens, np.int32), sampling=Sampling(**settings))
        return asyncio.run(search_beams(self.generate, request))

    def expected(self, tokens, **options):
        """Tokens and score by transformers."""
        given = torch.tensor([tokens])
        options = {"max_new_tokens": NEW, "pad_token_id": 0, "attention_mask": torch.ones_like(given), **options}
        found = self.reference.generate(
            given, do_sample=False, return_dict_in_generate=True, output_scores=True, **options
        )
        return found.sequences[0, len(tokens) :].tolist(), float(found.sequences_scores[0])


@lru_cache
def engine(family, ends=()):
    """An engine, kept with all that its cache holds."""
    return Engine(family, list(ends) or None)


@given(
    family=st.sampled_from(["llama", "qwen3"]),
    ends=st.sampled_from([(), (3,), MANY, MOST]),
    seed=st.integers(0, 1000),
    beams=st.integers(2, 6),
    length_penalty=st.sampled_from([-0.5, 0.0, 0.6, 1.0, 2.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
)
@example(family="qwen3", ends=MOST, seed=0, beams=2, length_penalty=2.0, early_stopping="never", repetition_penalty=1.0)
@example(family="qwen3", ends=MOST, seed=0, beams=2, length_penalty=2.0, early_stopping=True, repetition_penalty=1.0)
@example(family="qwen3", ends=MOST, seed=0, beams=2, length_penalty=2.0, early_stopping=False, repetition_penalty=1.0)
@example(family="qwen3", ends=MOST, seed=10, beams=3, length_penalty=2.0, early_stopping=False, repetition_penalty=1.0)
@settings(max_examples=80)
def test_sequences_and_scores_are_those_of_transformers(
    family, ends, seed, beams, length_penalty, early_stopping, repetition_penalty
):
    tokens = prompt(seed, 3 + seed % 11)
    options = {
        "num_beams": beams,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "repetition_penalty": repetition_penalty,
    }
    host = engine(family, ends)
    found, (expected, score) = host.search(tokens, **options), host.expected(tokens, **options)
    ended = len(found.tokens) < NEW or found.tokens[-1] in ends
    assert found.tokens.tolist() == expected
    assert float(found.logprobs.sum()) / len(expected) ** length_penalty == pytest.approx(score, abs=1e-4)
    assert found.finish is (FinishReason.STOP if ended else FinishReason.LENGTH)
    assert len(found.versions) == len(expected) and found.engines == (3,) and len(found.streams) == 1


def test_stop_tokens_and_strings_end_beams_as_end_tokens_do():
    plain, ending = engine("llama"), engine("llama", MANY)
    stops = tuple(Characters().decode([end]) for end in MANY)
    lengths = set()
    for seed in range(8):
        tokens = prompt(seed, 9)
        expected = ending.search(tokens, num_beams=3, early_stopping=True).tokens.tolist()
        lengths.add(len(expected))
        assert plain.search(tokens, num_beams=3, early_stopping=True, stop_tokens=MANY).tokens.tolist() == expected
        assert plain.search(tokens, num_beams=3, early_stopping=True, stop=stops).tokens.tolist() == expected
    assert len(lengths) > 2


class Presence(LogitsProcessor):
    """Subtracts a number from the scores of the tokens in the completion."""

    def __init__(self, penalty, start):
        self.penalty, self.start = penalty, start

    def __call__(self, tokens, scores):
        for row, completion in zip(scores, tokens[:, self.start :], strict=True):
            row[completion] -= self.penalty
        return scores


def test_penalties_of_the_completion_count_the_tokens_of_a_beam():
    host, changed = engine("llama"), 0
    for seed in range(6):
        tokens = prompt(seed, 9)
        found = host.search(tokens, num_beams=3, presence_penalty=1.5).tokens.tolist()
        assert found == host.expected(tokens, num_beams=3, logits_processor=[Presence(1.5, len(tokens))])[0]
        changed += found != host.expected(tokens, num_beams=3)[0]
    assert changed


def test_beams_share_what_the_engine_has_read():
    """A prompt is read once; later, a beam reads at most what it does not share with another that was before."""
    host = Engine("llama", slots=8)
    tokens = prompt(1, 40)
    host.search(tokens, num_beams=4)
    anew = sum(len(request.tokens) for request in host.requests)
    assert len(tokens) <= host.core.counters.read_tokens < anew / 5
    assert len(host.requests) == 1 + 4 * (NEW - 1) == host.core.counters.sampled_tokens
    assert len({request.id for request in host.requests}) == len(host.requests)


def test_engine_with_fewer_slots_than_beams_finds_the_same():
    tokens = prompt(2, 9)
    assert (
        Engine("llama", slots=1).search(tokens, num_beams=5).tokens.tolist()
        == Engine("llama", slots=8, draft_tokens=4).search(tokens, num_beams=5).tokens.tolist()
    )


def test_beams_beside_a_request_with_guesses():
    """Candidates come whether or not a step guesses tokens of another request."""
    tokens, host = prompt(2, 9), Engine("llama", slots=8, draft_tokens=4)
    sampling = Sampling(max_tokens=140, temperature=0.0)
    host.core.add(GenerateRequest(id="long", tokens=np.array(prompt(0, 9), np.int32), sampling=sampling))
    while not host.core.counters.confirmed_tokens:
        host.core.step()
    assert np.array_equal(host.search(tokens, num_beams=3).tokens, engine("llama").search(tokens, num_beams=3).tokens)
    assert host.core.busy, "the other request runs all the time"


def test_an_engine_without_candidates_is_refused():
    host = Engine("llama")

    async def generate(request):
        return await host.generate(replace(request, sampling=replace(request.sampling, num_beams=1)))

    request = GenerateRequest(id="r", tokens=np.array([5], np.int32), sampling=Sampling(max_tokens=5, num_beams=3))
    with raises_with(UnsupportedError, key="num_beams"):
        asyncio.run(search_beams(generate, request))


def test_error_of_one_beam_is_that_of_the_search():
    """And the others are cancelled."""
    host, cancelled = Engine("llama"), []

    async def generate(request):
        if request.id == "r/2/1":
            raise RequestError("refused")
        try:
            if request.id.startswith("r/2"):
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(request.id)
            raise
        return await host.generate(request)

    request = GenerateRequest(
        id="r", tokens=np.array([5, 6], np.int32), sampling=Sampling(max_tokens=5, temperature=0.0, num_beams=3)
    )
    with pytest.raises(RequestError, match="refused"):
        asyncio.run(search_beams(generate, request))
    assert sorted(cancelled) == ["r/2/0", "r/2/2"]
