"""Mastermind and Countdown."""

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon_envs.countdown.environment import Countdown
from antiphon_envs.mastermind.environment import Mastermind, score_guess
from tests.unit.tasks.worlds import at_random, check_contract, check_option_error, expert, play, success_rate

CODES = st.text("123456", min_size=4, max_size=4)


@pytest.mark.parametrize(
    "make",
    [
        Mastermind,
        lambda: Mastermind(repeats=False),
        lambda: Mastermind(length=2, digits=3, turns=6),
        Countdown,
        lambda: Countdown(numbers=3, highest=25, largest=1000),
        lambda: Countdown(numbers=2, highest=4),
    ],
)
def test_the_expert_wins_every_game(make):
    for seed in range(100):
        steps = play(make(), seed, expert)
        assert steps[-1][1:3] == (1.0, True) and steps[-1][4]["success"]
        assert all(step[4]["valid"] and step[4]["effective"] for step in steps)


def test_rates_of_a_random_policy():
    assert success_rate(Mastermind, at_random(0), 200) < 0.04  # 10 in 1,296
    # A code of 9 codes in 3 guesses: 1 - (8/9) ** 3.
    assert abs(success_rate(lambda: Mastermind(length=2, digits=3, turns=3), at_random(0), 500) - 0.298) < 0.06
    assert 0.05 < success_rate(Countdown, at_random(0), 200) < 0.25


@given(CODES, CODES)
def test_guesses_are_judged_as_by_the_rules(guess, code):
    """By crossing out, digit by digit."""
    left = [(a, b) for a, b in zip(guess, code, strict=True) if a != b]
    remaining = [b for _, b in left]
    elsewhere = 0
    for a, _ in left:
        if a in remaining:
            remaining.remove(a)
            elsewhere += 1
    assert score_guess(guess, code) == (4 - len(left), elsewhere)
    assert score_guess(guess, code) == score_guess(code, guess)


def test_a_game_of_mastermind():
    def game():
        made = Mastermind(length=2, digits=3, instructions=False, row_separator="/", turns=4)
        assert made.reset(5)[0] == "??"
        return made

    (code,) = (code for code in game().actions() if game().step(code)[1] == 1.0)
    wrong = [each for each in game().actions() if each != code]
    played = game()
    observation, _, _, _, info = played.step(" ".join(wrong[0]))
    assert re.fullmatch(rf"\?\?/{wrong[0]} \d \d", observation) and info["effective"]
    assert played.step(wrong[0])[4] == info | {"effective": False}
    played.step(wrong[1])
    other = game()
    other.step(wrong[1])
    assert other.step(wrong[0])[4]["state_key"] == played.step("4 1")[4]["state_key"]  # whatever the order


@given(st.lists(CODES | st.text(max_size=6), max_size=12))
@settings(max_examples=40)
def test_anything_can_be_said_to_mastermind(actions):
    steps = check_contract(lambda: Mastermind(format_penalty=0.5), 3, actions)
    told = set()
    for action, (_, reward, _, _, info) in zip(actions, steps, strict=False):
        code = action.strip().replace(" ", "")
        assert info["valid"] == (re.fullmatch("[1-6]{4}", code) is not None)
        told |= {code} if info["valid"] else set()
        assert {each.split(":")[0] for each in info["state_key"].split(",")} == (told or {""})
        assert reward == (float(info.get("success", False)) if info["valid"] else -0.5)


def test_a_game_of_countdown():
    game = Countdown(turns=20, format_penalty=0.25)
    text = game.reset(4)[0]
    assert text.endswith("\n\n1 4 4 10 -> 9") and "like 1 + 10" in text
    after = "1 1 10 -> 9"
    info = {"state_key": after, "valid": True, "effective": True}
    assert game.step("<answer>4/4</answer>") == (after, 0.0, False, False, info)
    for refused in ("1 - 1", "10 / 3", "7 + 1", "1 - 10", "1 / 0", "10 + 1 + 1", "1 + 1 = 2", "", "9" * 5000 + " + 1"):
        _, *worth, info = game.step(refused)
        assert worth == [-0.25, False, False] and info == {"state_key": after, "valid": False, "effective": False}
    assert game.step("10 - 1")[1:3] == (1.0, True)


def test_a_game_of_countdown_can_be_lost():
    game = Countdown()
    game.reset(4)
    assert [game.step(step)[2] for step in ("4 * 4", "10 * 1")] == [False, False]
    info = {"state_key": "6 -> 9", "valid": True, "effective": True, "success": False}
    assert game.step("16 - 10") == ("6 -> 9", 0.0, True, False, info)


@given(st.integers(0, 99), st.data())
@settings(max_examples=50)
def test_steps_of_countdown_are_sound_and_complete(seed, data):
    game = Countdown(numbers=4, highest=9, largest=60)
    text = game.reset(seed)[1]["state_key"]
    ended = False
    while not ended:
        have = [int(number) for number in text.split(" -> ")[0].split()]
        wanted = set()
        for i, a in enumerate(have):
            for j, b in enumerate(have):
                results = {"+": a + b, "-": a - b, "*": a * b, "/": Fraction(a, b)}
                wanted |= {f"{a} {s} {b}" for s, r in results.items() if i != j and 0 < r <= 60 and r == int(r)}
        assert set(game.actions()) == wanted
        *_, ended, truncated, info = game.step(data.draw(st.sampled_from(sorted(wanted))))
        after = [int(number) for number in info["state_key"].split(" -> ")[0].split()]
        assert len(after) == len(have) - 1 and after == sorted(after)
        text, ended = info["state_key"], ended or truncated


@given(st.lists(st.from_regex(r"[0-9]{1,2} ?[-+*/] ?[0-9]{1,2}", fullmatch=True) | st.text(max_size=9), max_size=9))
@settings(max_examples=40)
def test_anything_can_be_said_to_countdown(actions):
    check_contract(lambda: Countdown(format_penalty=0.5), 3, actions)


@pytest.mark.parametrize(
    ("make", "key", "valid"),
    [
        (lambda: Mastermind(digits=10), "digits", "less than or equal to 9"),
        (lambda: Mastermind(length=5, digits=4, repeats=False), "length", "a whole number from 1 to 4"),
        (lambda: Mastermind(length=6, digits=9), "length", "such that digits ** length is at most 20000"),
        (lambda: Countdown(numbers=6), "numbers", "less than or equal to 5"),
        (lambda: Countdown(largest=5), "largest", "a whole number from 10"),
        (lambda: Countdown(turns=2), "turns", "a whole number from 3"),
    ],
)
def test_invalid_options_are_refused(make, key, valid):
    check_option_error(make, key, valid)
