"""Deltas on their way: joining some of them changes nothing for whoever reads them all."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import REFUSALS, RequestError, UnsupportedError, UserCodeError
from antiphon.core.types import MIXED_CACHE, FinishReason, GenerateRequest, Sampling, Streams
from antiphon.engines.config import EngineConfig
from antiphon.engines.deltas import Delta
from antiphon.engines.generation import Generation
from antiphon.engines.server_protocols import SERVER_PROTOCOLS
from antiphon.engines.worker import EngineWorker


def apply(deltas):
    """What a reader holds after `deltas`: rows of (token, logprob, version, mixed), and the finish."""
    rows, finish = [], None
    for delta in deltas:
        if delta.restarted:
            rows = []
        columns = (delta.tokens, delta.logprobs, delta.versions, delta.streams.get(MIXED_CACHE, np.empty(0)))
        rows += list(zip(*(column.tolist() for column in columns), strict=True))
        finish = delta.finish
    return rows, finish


@st.composite
def streams(draw):
    """The deltas of one request, and where to cut them into bundles."""
    count = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    restarted = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    tokens = iter(range(sum(sizes)))
    deltas = []
    for number, (size, again) in enumerate(zip(sizes, restarted, strict=True)):
        own = np.array([next(tokens) for _ in range(size)], np.int32)
        deltas.append(
            Delta(
                request="r",
                tokens=own,
                logprobs=own.astype(np.float32) / -8,
                versions=own + 100,
                streams=Streams({MIXED_CACHE: own % 2 == 0}) if size else Streams(),
                restarted=again,
                finish=FinishReason.STOP if number == count - 1 else None,
            )
        )
    return deltas, draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()


@given(streams())
def test_bundles_tell_the_same(stream):
    deltas, cuts = stream
    edges = [0, *sorted(cuts), len(deltas)]
    bundles = [Delta.join(deltas[start:stop]) for start, stop in pairwise(edges)]
    assert apply(bundles) == apply(deltas)


def test_empty_completion_has_all_declared_streams():
    joined = Delta.join([Delta.empty("r"), Delta.empty("r", finish=FinishReason.ABORT)])
    assert MIXED_CACHE in joined.streams and joined.streams.length == 0


def test_joined_deltas_keep_a_refusal():
    refusal = RequestError("too long")
    assert Delta.join([Delta.empty("r"), Delta.empty("r", error=refusal)]).error is refusal
    assert Delta.join([Delta.empty("r", error=refusal)]).error is refusal


def test_any_error_of_add_refuses_one_request():
    worker, sent = EngineWorker("tests.unit.engine_for_tests:open_unready", "", EngineConfig(), "shared_memory"), []
    worker.emit = sent.append
    worker.add(GenerateRequest(id="r", tokens=np.zeros(1, np.int32), sampling=Sampling(max_tokens=3)))
    ((delta,),) = sent
    assert isinstance(delta.error, REFUSALS), "else an episode passes the error on, and the run ends"


def test_request_refused_in_a_step_is_answered_at_once():
    worker, sent = EngineWorker("tests.unit.engine_for_tests:open_refusing", "", EngineConfig(), "shared_memory"), []
    worker.emit = sent.append
    worker.add(GenerateRequest(id="r", tokens=np.zeros(1, np.int32), sampling=Sampling(max_tokens=3)))
    worker.advance()
    ((delta,),) = sent
    assert delta.request == "r" and isinstance(delta.error, RequestError)


def test_engine_that_must_record_experts_and_does_not_ends():
    kind = "tests.unit.engine_for_tests:open_expertless"
    worker = EngineWorker(kind, "", EngineConfig(routed_experts=True), "shared_memory")
    with pytest.raises(UserCodeError, match=r"engine\.routed_experts"):
        worker.advance()


@pytest.mark.parametrize(
    ("flavour", "told"),
    [
        ("openai", None),
        ("vllm", {"token_logprobs": [-0.5]}),
        ("vllm", {"token_logprobs": [-0.5, None]}),
        ("sglang", None),
    ],
)
def test_logprobs_that_a_server_omits_are_nan(flavour, told):
    protocol = SERVER_PROTOCOLS.resolve(flavour)("http://server")
    choice = {"token_ids": [5, 6], "logprobs": told, "finish_reason": None}
    about = {"output_token_logprobs": [[-0.5, 5], [None, 6]], "completion_tokens": 2, "finish_reason": None}
    piece = protocol.parse_chunk({"meta_info": about} if flavour == "sglang" else {"choices": [choice]}, 0)
    assert piece.tokens == [5, 6] and np.isnan(piece.logprobs[1])
    with pytest.raises(UnsupportedError):
        protocol.check_logprobs(piece.logprobs)
    protocol.check_logprobs([-0.5, 0.0])


@pytest.mark.parametrize("told", [0, 1, 3])
def test_delta_without_all_logprobs_has_none(told):
    class Engine:
        def forget(self, request):
            pass

    async def main():
        request = GenerateRequest(id="r", tokens=np.zeros(1, np.int32), sampling=Sampling(max_tokens=3))
        generation = Generation(Engine(), request)
        whole = np.full(2, -0.5, np.float32)
        for tokens, logprobs, finish in ((2, whole, None), (2, np.full(told, -0.5, np.float32), FinishReason.STOP)):
            generation.receive(
                Delta(
                    request="r",
                    tokens=np.arange(tokens, dtype=np.int32),
                    logprobs=logprobs,
                    versions=np.zeros(tokens, np.int32),
                    finish=finish,
                )
            )
        return await generation.result()

    completion = asyncio.run(main())
    assert np.isnan(completion.logprobs).tolist() == [False, False, True, True]


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_whoever_reads_along_sees_a_restart(before, after):
    """However many deltas come before and after it at once."""

    class Engine:
        def forget(self, request):
            pass

    def delta(token, finish=None, restarted=False):
        one = Delta.empty("r", finish=finish)
        return replace(one, tokens=np.array([token], np.int32), logprobs=np.zeros(1, np.float32), restarted=restarted)

    async def main():
        request = GenerateRequest(id="r", tokens=np.zeros(1, np.int32), sampling=Sampling(max_tokens=9))
        generation, seen = Generation(Engine(), request), []

        async def read():
            async for each in generation:
                seen.append((int(each.tokens[0]), each.restarted))

        reader = asyncio.create_task(read())
        for number in range(before):
            generation.receive(delta(number))
        await asyncio.sleep(0.01)
        for number in range(after):
            generation.receive(delta(10 + number, restarted=not number))
        generation.receive(delta(99, FinishReason.STOP))
        await reader
        return seen

    seen = asyncio.run(main())
    assert seen[before:] == [(10 + number, not number) for number in range(after)] + [(99, False)]
