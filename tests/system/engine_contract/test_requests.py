"""What every engine must do with requests, whoever makes the tokens: one suite, several engines.

For an engine of your own (`docs/engines.md`), named by the import path of its factory:

    pytest tests/system/engine_contract --engine my_package.my_engine:MyEngine
"""

import asyncio
import contextlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from antiphon.core.errors import RequestError, UnsupportedError, WorkerDiedError
from antiphon.core.types import MIXED_CACHE, SAMPLING_SUPPORT, FinishReason, OnUpdate
from tests.system.engine_contract.hosts import (
    EXACT,
    LONG,
    MAX_LENGTH,
    SLOTS,
    VOCABULARY,
    Simulated,
    check,
    contract,
    expected_logprobs,
    logprob_errors,
    request,
)


@contract
async def test_all_requests_end_however_many_there_are(host, engine):
    handles = [engine.start(request(f"r{i}", tokens=5 + i)) for i in range(4 * SLOTS)]
    for i, completion in enumerate(await asyncio.gather(*(handle.result() for handle in handles))):
        check(completion, 5 + i)
        assert completion.finish is FinishReason.LENGTH
        assert set(completion.versions) == {0} and not completion.streams[MIXED_CACHE].any()


@contract
async def test_prompts_that_no_single_step_reads(host, engine):
    prompts = [tuple(range(i, 60)) * 10 for i in range(3 * SLOTS)]
    handles = [engine.start(request(f"r{i}", prompt=prompt)) for i, prompt in enumerate(prompts)]
    whole = await asyncio.gather(*(handle.result() for handle in handles))
    alone = await engine.start(request("r5", prompt=prompts[5])).result()
    for completion in whole:
        check(completion, 20)
    assert np.array_equal(alone.tokens, whole[5].tokens)


@contract
async def test_limits_are_those_of_the_configuration(host, engine):
    assert engine.capacity == SLOTS
    if not isinstance(host, Simulated):
        assert (engine.max_length, engine.vocabulary) == (MAX_LENGTH, VOCABULARY)
        check(await engine.start(request("longest", prompt=(5,) * (MAX_LENGTH - 20))).result(), 20)


@contract
async def test_no_more_requests_run_than_there_are_slots(host, engine):
    ended = []

    async def follow(name, tokens):
        await engine.start(request(name, tokens)).result()
        ended.append(name)

    async with asyncio.TaskGroup() as owner:
        for i in range(SLOTS):
            owner.create_task(follow(f"r{i}", tokens=200))
        owner.create_task(follow("short", tokens=1))
    assert ended[0] != "short", "it starts when another request has ended"


@contract
async def test_deltas_come_to_the_result(host, engine):
    handle = engine.start(request("r", tokens=LONG))
    deltas = [delta async for delta in handle]
    whole = await handle.result()
    assert np.array_equal(np.concatenate([delta.tokens for delta in deltas]), whole.tokens)
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1) and deltas[-1].finish is whole.finish


@contract
async def test_what_is_aborted_gives_what_there_is(host, engine):
    running = [engine.start(request(f"r{i}", tokens=LONG)) for i in range(SLOTS)]
    queued = engine.start(request("queued"))
    await host.until_under_way(running[0])
    for handle in (queued, running[0]):
        handle.abort()
    cut, nothing = await running[0].result(), await queued.result()
    assert cut.finish is nothing.finish is FinishReason.ABORT
    assert 0 < len(cut.tokens) < LONG
    check(cut, len(cut.tokens))
    check(nothing, 0)
    check(await engine.start(request("next")).result(), 20)
    check(await running[1].result(), LONG)


@contract
async def test_an_id_may_be_used_again_as_soon_as_it_is_aborted(host, engine):
    first = engine.start(request("r", tokens=LONG))
    await host.until_under_way(first)
    first.abort()
    again = engine.start(request("r"))
    assert (await first.result()).finish is FinishReason.ABORT
    check(await again.result(), 20)


@contract
async def test_the_urgent_go_first(host, engine):
    ended = []

    async def follow(name, **changes):
        await engine.start(request(name, tokens=50, **changes)).result()
        ended.append(name)

    async with asyncio.TaskGroup() as owner:
        for i in range(3 * SLOTS):
            owner.create_task(follow(f"r{i}"))
        owner.create_task(follow("urgent", priority=-1))
    assert ended.index("urgent") < 2 * SLOTS


@contract
async def test_temperatures_and_seeds(host, engine):
    if isinstance(host, Simulated):
        pytest.skip("simulated tokens are drawn from nothing")
    asked = [
        request(f"{temperature}-{seed}-{repeat}", sampling={"temperature": temperature, "seed": seed})
        for temperature in (0.0, 0.5, 1.0, 2.0)
        for seed in (3, 1 << 40)
        for repeat in range(2)
    ]
    told = await asyncio.gather(*(engine.start(each).result() for each in asked))
    for each, completion in zip(asked, told, strict=True):
        assert logprob_errors(host, each, completion).max() < EXACT
    same = [np.array_equal(one.tokens, other.tokens) for one, other in pairwise(told)]
    assert all(same[::2]), "the same seed draws the same"
    assert same[1::4] == [True, False, False, False], "another seed draws otherwise, but greedy draws nothing"


def check_draws(probabilities: np.ndarray, tokens: np.ndarray) -> None:
    """Assert that tokens [N] were drawn from the rows of `probabilities` [N, V].

    The place of a token drawn from a row, in the running sum of that row with the likeliest token first, is uniform in
    [0, 1). A correct engine exceeds the bound with a probability of 2e-9.
    """
    order = np.argsort(-probabilities, axis=1)
    ranked = np.take_along_axis(probabilities, order, 1)
    column = np.argmax(order == tokens[:, None], axis=1)
    rows = np.arange(len(tokens))
    mass, end = ranked[rows, column], ranked.cumsum(1)[rows, column]
    assert np.all(mass > 0), "tokens outside the distribution"
    places = np.clip(end - mass * np.random.default_rng(0).random(len(tokens)), 0, 1)
    counts, expected = np.histogram(places, bins=20, range=(0, 1))[0], len(tokens) / 20
    chi_square = np.sum((counts - expected) ** 2) / expected
    assert chi_square < 80, f"chi-square {chi_square:.0f} with 19 degrees of freedom"


@contract
async def test_draws_follow_the_distribution(host, engine):
    if isinstance(host, Simulated):
        pytest.skip("simulated tokens are drawn from nothing")
    for temperature in (0.5, 1.5):
        sampling = {"temperature": temperature}
        asked = [request(f"r{seed}", tokens=300, sampling=sampling | {"seed": seed}) for seed in range(5)]
        told = await asyncio.gather(*(engine.start(each).result() for each in asked))
        logprobs = [expected_logprobs(host, each, completion) for each, completion in zip(asked, told, strict=True)]
        tokens = np.concatenate([completion.tokens for completion in told])
        check_draws(np.exp(np.concatenate(logprobs).astype(np.float64)), tokens)


def truncate(probabilities: np.ndarray, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> np.ndarray:
    """Return the rows of `probabilities` [N, V] truncated by one of the settings, with a sum of 1 again."""
    ranked = -np.sort(-probabilities, axis=1)
    last = np.full((len(ranked), 1), top_k - 1)  # column of the least likely token that is kept
    if top_p < 1:
        last = np.sum(ranked.cumsum(1) - ranked < top_p, axis=1, keepdims=True) - 1
    floor = min_p * ranked[:, :1] if min_p else np.take_along_axis(ranked, last, 1)
    kept = np.where(probabilities >= floor, probabilities, 0)
    return kept / kept.sum(1, keepdims=True)


@contract
async def test_truncated_sampling_is_done_or_refused(host, engine):
    """Log-probs are those of the whole distribution, or of what is left of it where the tokens chosen from are recorded."""
    if isinstance(host, Simulated):
        pytest.skip("simulated tokens are drawn from nothing")
    for truncation in ({"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.3}):
        asked = request("r", tokens=500, sampling=truncation)
        try:
            told = await engine.start(asked).result()
        except UnsupportedError:
            continue
        whole = np.exp(expected_logprobs(host, asked, told).astype(np.float64))
        left = truncate(whole, **truncation)
        check_draws(left, told.tokens)
        support = told.streams.get(SAMPLING_SUPPORT, None)
        if support is not None:
            chosen_from = np.zeros((len(support), 1 + left.shape[1]), bool)
            np.put_along_axis(chosen_from, support, True, 1)
            assert np.array_equal(chosen_from[:, 1:], left > 0)
        expected = np.log((whole if support is None else left)[np.arange(len(left)), told.tokens])
        assert np.abs(expected - told.logprobs).max() < EXACT
    check(await engine.start(request("next")).result(), 20)


def penalized_logprobs(host, request, completion) -> np.ndarray:
    """Log-probs of the tokens of a completion, with penalties by their definitions on the logits of transformers."""
    sampling, prompt = request.sampling, request.tokens.tolist()
    sequence, found = [*prompt, *completion.tokens.tolist()], []
    for place, (token, version) in enumerate(
        zip(completion.tokens, completion.versions.tolist(), strict=True), len(prompt)
    ):
        with torch.no_grad():
            logits = host.model(version)(torch.tensor([sequence[:place]])).logits[0, -1].double().numpy()
        output = sequence[len(prompt) - request.sampled : place]
        for seen in set(sequence[:place]):
            logits[seen] *= sampling.repetition_penalty ** (1 if logits[seen] < 0 else -1)
            logits[seen] -= sampling.presence_penalty * (seen in output) + sampling.frequency_penalty * output.count(
                seen
            )
        logits /= sampling.temperature or 1.0
        found.append(logits[token] - np.logaddexp.reduce(logits))
    return np.array(found)


@contract
async def test_penalties_are_applied_or_refused(host, engine):
    """Also across an update of the weights, and to tokens that another engine has sampled."""
    if isinstance(host, Simulated):
        pytest.skip("simulated tokens are drawn from nothing")
    asked = [
        request(f"r{number}", 40, sampling={"temperature": temperature, **penalty}, sampled=sampled)
        for number, (penalty, temperature, sampled) in enumerate(
            [
                ({"repetition_penalty": 1.5}, 1.0, 0),
                ({"repetition_penalty": 0.7}, 0.0, 2),
                ({"presence_penalty": 1.2}, 1.0, 0),
                ({"frequency_penalty": -0.4}, 0.5, 0),
                ({"frequency_penalty": 0.4}, 1.0, 2),
                ({"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.5}, 1.0, 0),
            ]
        )
    ]
    handles = [engine.start(each) for each in asked]
    running = await asyncio.gather(*(handle.result() for handle in handles), return_exceptions=True)
    late = request("late", LONG, sampling={"presence_penalty": 1.0})
    handle = engine.start(late)
    with contextlib.suppress(UnsupportedError):
        await host.until_under_way(handle)
        await engine.load(host.update(1), OnUpdate.RECOMPUTE)
        asked.append(late)
        running.append(await handle.result())
    for each, completion in zip(asked, running, strict=True):
        if isinstance(completion, UnsupportedError):
            continue
        check(completion, each.sampling.max_tokens)
        assert np.abs(penalized_logprobs(host, each, completion) - completion.logprobs).max() < EXACT
    check(await engine.start(request("next")).result(), 20)


@contract
async def test_extreme_temperatures_fail_alone_or_not(host, engine):
    """Engines that do not sample at them say so."""
    for temperature in (100.0, 1e-3):
        with contextlib.suppress(RequestError, UnsupportedError):
            extreme = request(f"at {temperature}", sampling={"temperature": temperature})
            check(await engine.start(extreme).result(), 20)
        await engine.health()
    check(await engine.start(request("next")).result(), 20)


@contract
async def test_continued_request_draws_new_random_numbers(host, engine):
    """Another engine continues a request of a lost one, with the tokens so far in its prompt."""
    if isinstance(host, Simulated):
        pytest.skip("simulated tokens are drawn from nothing")
    sampling = {"temperature": 2.0, "seed": 7}  # almost uniform: the same random numbers would draw the same tokens
    whole = await engine.start(request("r", tokens=20, sampling=sampling)).result()
    prompt = (*request("r").tokens.tolist(), *whole.tokens.tolist())
    rest = await engine.start(request("r", tokens=20, prompt=prompt, sampling=sampling)).result()
    assert np.sum(rest.tokens == whole.tokens) < 7, "the first draws are repeated"


@contract
async def test_stops_end_a_request_and_are_part_of_it(host, engine):
    if isinstance(host, Simulated):
        pytest.skip("simulated tokens are drawn from nothing")
    stops = {"stop_tokens": tuple(range(30))}, {"stop": tuple(chr(33 + token) for token in range(30))}
    for number, stop in enumerate(stops):
        told = await engine.start(request(f"r{number}", tokens=LONG, sampling=stop)).result()
        assert told.finish is FinishReason.STOP
        assert told.tokens[-1] < 30 and np.all(told.tokens[:-1] >= 30)
        check(told, len(told.tokens))


def test_end_tokens_of_the_model_end_a_request(ending):
    """They do when the model samples them, whatever the prompt holds; at the limit, too, the reason is the end token."""
    ends = np.array(ending.ends)

    async def main():
        async with ending.engine() as engine:
            asked = request("r", tokens=LONG, prompt=(5, 60, 7))
            whole = await engine.start(asked).result()
            check(whole, len(whole.tokens))
            assert whole.finish is FinishReason.STOP
            assert np.flatnonzero(np.isin(whole.tokens, ends)).tolist() == [len(whole.tokens) - 1]
            assert logprob_errors(ending, asked, whole).max() < EXACT
            limited = await engine.start(request("s", tokens=len(whole.tokens), prompt=(5, 60, 7))).result()
            assert np.array_equal(limited.tokens, whole.tokens) and limited.finish is FinishReason.STOP

    ending.run(main())


INVALID = {  # for any engine
    "attachments": {"attachments": ("image",)},
    "no prompt": {"prompt": ()},
    "no tokens": {"tokens": 0},
    "fewer than no tokens": {"tokens": -3},
    "half a token": {"sampling": {"max_tokens": 2.5}},
    "temperature below 0": {"sampling": {"temperature": -1.0}},
    "temperature nan": {"sampling": {"temperature": float("nan")}},
    "temperature inf": {"sampling": {"temperature": float("inf")}},
    "temperature that makes logits infinite": {"sampling": {"temperature": 1e-40}},
    "temperature that is text": {"sampling": {"temperature": "hot"}},
    "top_p 0": {"sampling": {"top_p": 0.0}},
    "top_p above 1": {"sampling": {"top_p": 1.5}},
    "top_k below 0": {"sampling": {"top_k": -1}},
    "top_k beyond 64 bits": {"sampling": {"top_k": 1 << 70}},
    "min_p above 1": {"sampling": {"min_p": 2.0}},
    "seed that is no whole number": {"sampling": {"seed": 0.5}},
    "repetition_penalty 0": {"sampling": {"repetition_penalty": 0.0}},
    "repetition_penalty infinite": {"sampling": {"repetition_penalty": float("inf")}},
    "presence_penalty above 2": {"sampling": {"presence_penalty": 2.5}},
    "frequency_penalty below -2": {"sampling": {"frequency_penalty": -2.5}},
    "num_beams 0": {"sampling": {"num_beams": 0}},
    "stop that is no text": {"sampling": {"stop": ("\ud83d",)}},
}
TOO_MUCH = {  # for one whose model has an end
    "token below 0": {"prompt": (5, -1)},
    "token beyond the vocabulary": {"prompt": (5, VOCABULARY)},
    "prompt longer than the limit": {"prompt": (5,) * MAX_LENGTH},
    "longer than the limit by one token": {"tokens": MAX_LENGTH - 3},
}


@contract
async def test_invalid_requests_fail_alone(host, engine):
    running = engine.start(request("running", tokens=LONG))
    for name, change in (INVALID | ({} if isinstance(host, Simulated) else TOO_MUCH)).items():
        with pytest.raises(RequestError):
            await engine.start(request(name, **change)).result()
    for odd in (np.zeros((2, 2), np.int32), np.array([0.5]), [1, 2, 3]):
        with pytest.raises(RequestError):
            await engine.start(replace(request("odd"), tokens=odd)).result()
    twin = engine.start(request("running"))
    with pytest.raises(RequestError):
        await twin.result()
    twin.abort()
    await engine.health()
    check(await engine.start(request("next")).result(), 20)
    check(await running.result(), LONG)


@contract
async def test_killed_engine_fails_waiters_and_keeps_its_deltas(host, engine):
    handle = engine.start(request("r", tokens=LONG))
    await host.until_under_way(handle)
    await engine.health()
    host.kill(engine)
    with pytest.raises(WorkerDiedError):
        await handle.result()
    told = handle.partial()
    assert told.finish is FinishReason.ABORT and 0 < len(told.tokens) < LONG
    check(
        replace(told, timing=replace(told.timing, finished=max(told.timing.finished, told.timing.started))),
        len(told.tokens),
    )
    with pytest.raises(WorkerDiedError):
        await engine.start(request("late")).result()
    with pytest.raises(WorkerDiedError):
        await engine.load(host.update(1), OnUpdate.RECOMPUTE)
    with pytest.raises(WorkerDiedError):
        await engine.health()
