"""Guessed tokens change how many tokens a step yields, and nothing about which: compared with an engine that guesses none."""

import numpy as np
import pytest

from antiphon.core.types import FinishReason, GenerateRequest, OnUpdate, Sampling
from antiphon.engines.native import drafts
from antiphon.engines.native.drafts import HOPELESS, Drafter, GuessedStep
from antiphon.engines.native.slots import SlotTable
from tests.unit.engines.native_support import make_host, prompt
from tests.unit.engines.test_native_parity import EXACT, TOLERANCE, busy_run

GUESSES = {"draft_tokens": 6, "draft_rows": 24}


def both(family="llama", **config):
    """Two hosts that differ in guesses alone."""
    return make_host(family, **config), make_host(family, **config, **GUESSES)


def add_requests(host, seed):
    """Ragged requests of all kinds, some of which answer the same prompt; with stops, limits, truncation and penalties."""
    rng = np.random.default_rng(seed)
    for i in range(16):
        sampling = {
            "temperature": float(rng.choice([0.0, 0.3, 0.6, 1.0])),
            "seed": i % 5,
            "max_tokens": int(rng.integers(1, 60)),
        }
        if i % 4 == 1:
            sampling |= {"stop_tokens": (int(rng.integers(97)),)}
        if i % 4 == 2:
            sampling |= {"top_k": 5, "top_p": 0.9}
        if i % 4 == 3:
            sampling |= {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
        host.add(f"r{i}", prompt(i % 4, 6 + 5 * (i % 4)), **sampling)
        host.step(int(rng.integers(0, 4)))
    host.run()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slots", [1, 5])
def test_tokens_are_those_of_an_engine_without_guesses(seed, slots):
    plain, guessing = both("qwen3", slots=slots)
    for host in (plain, guessing):
        add_requests(host, seed)
    for name in plain.requests:
        assert guessing.tokens(name) == plain.tokens(name), name
        assert guessing.finish(name) is plain.finish(name)
        np.testing.assert_allclose(guessing._joined(name, "logprobs"), plain._joined(name, "logprobs"), atol=TOLERANCE)
    counters = guessing.engine.counters
    recorded = [name for name, each in plain.requests.items() if each.sampling.support_size]
    assert recorded
    for name in recorded:
        supports = [host.stream(name, "sampling_support") for host in (guessing, plain)]
        assert np.array_equal(*supports) and supports[0].shape[1] == 5
        assert all(token + 1 in kept for token, kept in zip(plain.tokens(name), supports[0], strict=True))
    assert counters.sampled_tokens == plain.engine.counters.sampled_tokens
    assert 0 < counters.confirmed_tokens < counters.guessed_tokens and counters.steps < plain.engine.counters.steps


@pytest.mark.parametrize("mode", [None, OnUpdate.KEEP, *EXACT])
def test_logprobs_are_exact_under_updates(mode):
    host = make_host("llama", **GUESSES)
    busy_run(host, 0.3, mode)
    errors, mixed = host.logprob_errors()
    assert errors[~mixed].max() < TOLERANCE and host.engine.counters.confirmed_tokens > 0
    assert mixed.any() == (mode is OnUpdate.KEEP)


def test_experts_are_those_of_an_engine_without_guesses():
    plain, guessing = both("qwen3 moe", slots=3, routed_experts=True)
    for host in (plain, guessing):
        for i in range(6):
            host.add(f"r{i}", prompt(i % 2, 9), max_tokens=40, temperature=0.0)
        host.run()
    assert guessing.engine.counters.confirmed_tokens > 0
    for name in plain.requests:
        assert (guessing.stream(name, "routed_experts") == plain.stream(name, "routed_experts")).all()


def test_prompt_that_comes_again_takes_fewer_steps():
    """All is guessed right that was said before with the same draws, after the first tokens."""
    host = make_host("llama", slots=1, draft_tokens=8)
    steps = []
    for name in ("first", "again"):
        before = host.engine.counters.steps
        host.add(name, prompt(3, 20), max_tokens=64, temperature=1.0, seed=7)
        host.run()
        steps.append(host.engine.counters.steps - before)
    assert host.tokens("again") == host.tokens("first")
    assert steps[1] < 0.4 * steps[0]
    assert host.engine.counters.read_tokens == 2 * 20, "the prompts; what was confirmed is not read again"


def test_nothing_is_guessed_while_many_sequences_run():
    host = make_host("llama", slots=6, draft_tokens=8, draft_rows=6)
    for i in range(6):
        host.add(f"r{i}", prompt(0, 9), max_tokens=30, temperature=0.0)
    while host.engine.counters.sampled_tokens < 6 * 29:
        host.step()
    assert host.engine.counters.guessed_tokens == 0


def table_with(tokens, limit=100):
    table = SlotTable(2, 64)
    table.active[0] = True
    table.prompt[0], table.length[0], table.cached[0], table.limit[0] = 4, len(tokens), len(tokens) - 1, limit
    table.tokens[0, : len(tokens)] = tokens
    table.requests[0] = type("Request", (), {"id": "r"})()
    return table


def test_guess_is_what_followed_the_same_tokens_last_time():
    tokens = [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3]
    guess = Drafter(4, 32).guess(table_with(tokens), np.array([0]))
    assert guess[0].tolist() == [6, 7, 1, 2], "the last time, not the first"
    assert not Drafter(4, 32).guess(table_with([1, 2, 3, 4, 5, 6]), np.array([0])), "they never occurred"
    assert Drafter(4, 32).guess(table_with(tokens, limit=len(tokens) + 3), np.array([0]))[0].tolist() == [6, 7]
    assert not Drafter(4, 32).guess(table_with(tokens, limit=len(tokens) + 1), np.array([0])), (
        "one token is drawn anyway"
    )
    assert Drafter(4, 3).guess(table_with(tokens), np.array([0]))[0].tolist() == [6, 7], "no more rows than allowed"


def test_sequence_that_begins_again_is_read_again():
    table = table_with([1, 2, 3, 4, 5, 1, 2, 3])
    drafter = Drafter(4, 32)
    assert drafter.guess(table, np.array([0]))[0].tolist() == [4, 5, 1, 2]
    table.length[0], table.tokens[0, 4:7] = 7, [1, 2, 3]
    assert drafter.guess(table, np.array([0]))[0].tolist() == [4, 1, 2, 3], "1 2 3 4 1 2 3 now"


def test_guesses_that_are_wrong_again_and_again_become_rare():
    drafter, table = Drafter(4, 32), table_with([1, 2, 3, 4, 5, 1, 2, 3])
    tried = 0
    for _ in range(200):
        if guess := drafter.guess(table, np.array([0])):
            tried += 1
            drafter.note(0, len(guess[0]), 0)
    assert 200 / 10 < tried < 200 / 5
    sequence = drafter._sequences[0]
    assert sequence.share < HOPELESS
    while sequence.share < 0.9:
        if guess := drafter.guess(table, np.array([0])):
            drafter.note(0, len(guess[0]), len(guess[0]))
    assert len(drafter.guess(table, np.array([0]))[0]) == 4


def laid_out(guesses):
    table = table_with([1, 2, 3, 4])
    table.length[1] = 9
    return GuessedStep.lay_out(
        table, np.array([0, 1]), {slot: np.array(guess, np.int32) for slot, guess in guesses.items()}
    )


def test_right_guesses_are_counted_to_the_first_wrong_one():
    for drawn, guess, right in (([1, 2, 3], [1, 2], 2), ([1, 9, 3], [1, 2], 1), ([9, 2, 3], [1, 2], 0)):
        assert laid_out({0: guess}).count_right(np.array([7, *drawn])) == [right], "a row of another slot comes first"


def test_rows_are_laid_out_and_kept_in_order():
    step = laid_out({1: [5, 6]})
    assert (step.others.tolist(), step.chunks, step.starts) == ([0], [(1, 8, 11)], [1])
    assert (step.slots.tolist(), step.positions.tolist()) == ([0, 1, 1, 1], [4, 9, 10, 11])
    kept = [(slots.tolist(), rows.tolist()) for slots, rows in step.iterate_rounds([1])]
    assert kept == [([0, 1], [0, 1]), ([1], [2])], "the first guess was right: two tokens"
    both = laid_out({0: [5], 1: [5, 6]})
    kept = [(slots.tolist(), rows.tolist()) for slots, rows in both.iterate_rounds([0, 2])]
    assert kept == [([0, 1], [0, 2]), ([1], [3]), ([1], [4])]


def test_requests_end_within_guessed_tokens():
    """A stop anywhere among tokens that were guessed right: what follows it is dropped."""
    host = make_host("llama", slots=1, draft_tokens=8)
    host.add("first", prompt(3, 20), max_tokens=40, temperature=1.0, seed=7)
    host.run()
    tokens = host.tokens("first")
    for stop in range(1, 40):
        if tokens[stop] in tokens[:stop]:
            continue
        name = f"to {stop}"
        host.add(name, prompt(3, 20), max_tokens=40, temperature=1.0, seed=7, stop_tokens=(tokens[stop],))
        host.run()
        assert host.tokens(name) == tokens[: stop + 1] and host.finish(name) is FinishReason.STOP
    host.add("other", prompt(3, 20) + tokens[:3], max_tokens=5, temperature=1.0, seed=7)
    host.run()
    assert len(host.tokens("other")) == 5 and host.logprob_errors()[0].max() < TOLERANCE


def test_request_ends_within_guessed_tokens_beside_one_with_stops():
    """The rounds after its end have no sequence at all, and rules to check: those of the other request."""
    host = make_host("llama", slots=2, draft_tokens=8)
    host.add("first", prompt(3, 20), max_tokens=40, temperature=1.0, seed=7)
    host.run()
    tokens = host.tokens("first")
    stop = next(stop for stop in range(24, 40) if tokens[stop] not in tokens[:stop])
    host.add("beside", prompt(4, 9), max_tokens=120, stop_tokens=(tokens[stop],))
    host.add("again", prompt(3, 20), max_tokens=40, temperature=1.0, seed=7, stop_tokens=(tokens[stop],))
    host.run()
    assert host.tokens("again") == tokens[: stop + 1]


def test_no_more_is_remembered_than_allowed(monkeypatch):
    monkeypatch.setattr(drafts, "MOST_TOKENS", 12)
    monkeypatch.setattr(drafts, "MOST_TOKENS_OF_ALL", 30)
    drafter, slot = Drafter(4, 32), np.array([0])
    table = table_with([1, 2, 3, 4, *range(5, 45), 20, 21, 22])
    assert not drafter.guess(table, slot), "20 21 22 came after the last token that is remembered"
    table.tokens[0, 47:50], table.length[0] = [5, 6, 7], 50
    assert drafter.guess(table, slot)[0].tolist()[:2] == [8, 9], "these came before it"
    for number in range(5):
        table = table_with([number, 2, 3, 4, *range(20)])
        table.requests[0] = type("Request", (), {"id": f"r{number}"})()
        drafter.guess(table, slot)
    assert len(drafter._histories) == 3 and all(each.tokens == 12 for each in drafter._histories.values())


@pytest.mark.parametrize(("after", "guessed"), [([7, -5, 9], [7]), ([-5, -6, 7], [])], ids=str)
def test_no_token_of_an_image_is_guessed(after, guessed):
    """In the slots' tokens these are negative."""
    table, drafter = SlotTable(1, 32), Drafter(6, 24)
    tokens = np.array([1, 2, 3, *after, 1, 2, 3], np.int32)
    request = GenerateRequest(id="r", tokens=np.abs(tokens), sampling=Sampling(max_tokens=9))
    table.admit(request, 0, tokens)
    found = drafter.guess(table, np.array([0]))
    assert [guess.tolist() for guess in found.values()] == ([guessed] if guessed else [])
