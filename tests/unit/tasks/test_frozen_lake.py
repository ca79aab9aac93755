"""FrozenLake: its boards, its dynamics, its text."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.tasks.environments.base import OptionError
from antiphon.tasks.environments.frozen_lake import FrozenLake
from tests.raising import raises_with
from tests.unit.tasks.worlds import at_random, check_contract, check_option_error, expert, play, success_rate

KNOWN = ("SFFF", "FHFH", "FFFH", "HFFG")
NUMBERS = {"left": 0, "down": 1, "right": 2, "up": 3}  # Gymnasium's


@pytest.mark.parametrize("options", [{}, {"size": 8}, {"random_places": True, "size": 6, "frozen": 0.6}])
def test_the_expert_crosses_every_lake_the_shortest_way(options):
    for seed in range(100):
        steps = play(FrozenLake(**options), seed, expert)
        assert steps[-1][1:3] == (1.0, True) and steps[-1][4]["success"]
        assert all(step[1] == 0.0 and step[4]["effective"] for step in steps[:-1])
        if not options.get("random_places"):
            assert len(steps) >= 2 * (options.get("size", 4) - 1)


def test_rates_of_a_random_policy():
    assert 0.02 < success_rate(FrozenLake, at_random(0), 400) < 0.12
    assert 0.02 < success_rate(lambda: FrozenLake(slippery=True), at_random(0), 400) < 0.12


def chance_to_win(board, turns, success_rate=1 / 3):
    """Of the best policy, by backward induction over plain loops."""
    cells = dict(enumerate("".join(board)))
    width = len(board[0])

    def beside(cell, way):
        row, column = divmod(cell, width)
        row = min(max(row + (way == 1) - (way == 3), 0), len(board) - 1)
        column = min(max(column + (way == 2) - (way == 0), 0), width - 1)
        return row * width + column

    value = {cell: float(kind == "G") for cell, kind in cells.items()}
    for _ in range(turns):
        value = {
            cell: value[cell]
            if kind in "GH"
            else max(
                success_rate * value[beside(cell, way)]
                + (1 - success_rate) / 2 * (value[beside(cell, (way + 1) % 4)] + value[beside(cell, (way - 1) % 4)])
                for way in range(4)
            )
            for cell, kind in cells.items()
        }
    return value["".join(board).index("S")]


def test_the_expert_on_slippery_ice_wins_as_often_as_can_be():
    wanted = chance_to_win(KNOWN, turns=40)
    won = success_rate(lambda: FrozenLake(board=KNOWN, slippery=True, turns=40), expert, 400)
    assert abs(won - wanted) < 3 * np.sqrt(wanted * (1 - wanted) / 400)


@pytest.mark.parametrize("slippery", [False, True])
def test_dynamics_are_those_of_gymnasium(slippery):
    gymnasium = pytest.importorskip("gymnasium")
    for seed, rate in itertools.product(range(10), (1 / 3, 0.8)):
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        board = generate_random_map(size=4 + seed % 5, seed=seed)
        theirs = gymnasium.make("FrozenLake-v1", desc=board, is_slippery=slippery, success_rate=rate).unwrapped
        ours = FrozenLake(board=board, slippery=slippery, success_rate=rate)
        ours.reset(seed)
        for cell, way in itertools.product(range(len(board) ** 2), NUMBERS):
            wanted, found = {}, {}
            for probability, to, *_ in theirs.P[cell][NUMBERS[way]]:
                wanted[to] = wanted.get(to, 0.0) + probability
            for probability, to in ours.outcomes(cell, way):
                found[to] = found.get(to, 0.0) + probability
            assert found == pytest.approx(wanted)


def test_games_on_hard_ice_are_those_of_gymnasium():
    gymnasium = pytest.importorskip("gymnasium")
    for seed in range(20):
        theirs = gymnasium.make("FrozenLake-v1", desc=KNOWN, is_slippery=False, max_episode_steps=12)
        ours = FrozenLake(board=KNOWN, turns=12)
        ours.reset(seed)
        theirs.reset(seed=seed)
        random = np.random.default_rng(seed)
        ended = False
        while not ended:
            way = str(random.choice(list(NUMBERS)))
            _, reward, terminated, truncated, info = ours.step(way)
            at, *wanted, _ = theirs.step(NUMBERS[way])
            assert [reward, terminated, truncated and not terminated] == [*wanted[:2], wanted[2] and not wanted[1]]
            assert info["state_key"].replace("\n", "").index("P") == at
            ended = terminated or truncated


def test_slips_are_as_often_as_they_should_be():
    ended_at = {2: 0, 4: 0, 6: 0, 8: 0}  # after "up" from the middle of 3 x 3
    for seed in range(1500):
        lake = FrozenLake(board=("FFF", "FSF", "FFG"), slippery=True, success_rate=0.6)
        lake.reset(seed)
        ended_at[lake.step("up")[4]["state_key"].replace("\n", "").index("P") + 1] += 1
    assert ended_at[8] == 0
    assert ended_at[2] / 1500 == pytest.approx(0.6, abs=0.04)
    assert ended_at[4] / 1500 == pytest.approx(0.2, abs=0.04)


def test_drawn_boards_have_as_many_holes_as_gymnasiums():
    drawn = [FrozenLake(size=4).reset(seed)[1]["state_key"] for seed in range(500)]
    assert all(board.startswith("P") and board.endswith("G") for board in drawn)
    assert len(set(drawn)) > 250
    # 2.8 of 14 cells but for boards that cannot be won; 2.515 on average in 4,000 of Gymnasium's `generate_random_map`.
    assert abs(np.mean([board.count("O") for board in drawn]) - 2.515) < 0.2


def test_a_game_in_words():
    lake = FrozenLake(board=KNOWN, turns=3)
    observation, info = lake.reset(0)
    assert "Reach the goal" in observation and "Say one of Up, Down, Left, Right." in observation
    assert observation.endswith("\n\nP___\n_O_O\n___O\nO__G")
    assert info == {"state_key": "P___\n_O_O\n___O\nO__G", "valid": True, "effective": False}
    observation, reward, terminated, truncated, info = lake.step("I think. <answer> right </answer>")
    assert (observation, reward, terminated, truncated) == ("_P__\n_O_O\n___O\nO__G", 0.0, False, False)
    assert info == {"state_key": observation, "valid": True, "effective": True}
    assert lake.step("Up")[4] == {"state_key": observation, "valid": True, "effective": False}
    observation, reward, terminated, truncated, info = lake.step("Down")
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)
    with pytest.raises(RuntimeError, match="over"):
        lake.step("Up")


def test_the_last_turn_truncates():
    lake = FrozenLake(turns=6)
    lake.reset(0)
    steps = [lake.step("up") for _ in range(6)]
    assert [step[3] for step in steps] == [False] * 5 + [True]
    assert steps[-1][4]["success"] is False


def test_a_character_a_move():
    lake = FrozenLake(
        board=KNOWN, words="UDLR", row_separator="/", instructions=False, symbols={"hole": "H", "ice": "."}
    )
    assert lake.reset(0)[0] == "P.../.H.H/...H/H..G"
    assert lake.step("D")[0] == "..../PH.H/...H/H..G"
    assert lake.step("Down")[::4] == (
        "..../PH.H/...H/H..G",
        {"state_key": "____\nPO_O\n___O\nO__G", "valid": False, "effective": False},
    )
    assert lake.actions() == ("U", "D", "L", "R")
    assert FrozenLake(board=KNOWN, column_separator=" ").reset(0)[0].endswith("\nO _ _ G")


def test_several_moves_in_a_turn():
    lake = FrozenLake(board=KNOWN, most_actions=3, format_penalty=0.25)
    assert "up to 3 of them" in lake.reset(0)[0]
    assert lake.step("down, down, right")[0] == "____\n_O_O\n_P_O\nO__G"
    for refused in ("", "right,", "right, jump", "right, right, right, right"):
        observation, reward, *_, info = lake.step(refused)
        assert (reward, info["valid"], info["effective"]) == (-0.25, False, False)
        assert observation == (
            "That cannot be done. Say one of Up, Down, Left, Right, or up to 3 of them, separated by commas.\n\n"
            "____\n_O_O\n_P_O\nO__G"
        )
    assert lake.step("down, right, right")[1:3] == (1.0, True)
    fallen = FrozenLake(board=KNOWN, most_actions=3)
    fallen.reset(0)
    assert fallen.step("right, down, right")[0].startswith("____\n_P_O")  # what is said after the end is not done


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(["up", "Down", " LEFT", "right", "up, down", "x", ""]) | st.text(max_size=9), max_size=25)
)
def test_anything_can_be_said(actions):
    for options in ({"slippery": True}, {"most_actions": 2, "random_places": True, "format_penalty": 0.5}):
        lake = FrozenLake(size=5, **options)
        for _, reward, terminated, truncated, info in check_contract(
            lambda o=options: FrozenLake(size=5, **o), 7, actions
        ):
            board = info["state_key"].split("\n")
            assert [len(row) for row in board] == [5] * 5
            assert info["state_key"].count("P") == 1
            assert not truncated or not info["success"]
            assert reward == (
                -lake.config.format_penalty if not info["valid"] else float(terminated and info["success"])
            )


@given(st.integers(0, 50), st.lists(st.sampled_from(["up", "down", "left", "right"]), max_size=12))
def test_keys_are_equal_where_and_only_where_states_are(seed, actions):
    """A state is the board and a place on it: the key must tell them apart, and nothing else."""
    lake = FrozenLake()
    key = lake.reset(seed)[1]["state_key"]
    row, column = 0, 0
    places = {(row, column): key}
    for action in actions:
        *_, terminated, _, info = lake.step(action)
        row = min(max(row + (action == "down") - (action == "up"), 0), 3)
        column = min(max(column + (action == "right") - (action == "left"), 0), 3)
        assert places.setdefault((row, column), info["state_key"]) == info["state_key"]
        if terminated:
            break
    assert len(set(places.values())) == len(places)


@pytest.mark.parametrize(
    ("options", "key", "valid"),
    [
        ({"size": 1}, "size", "greater than or equal to 2"),
        ({"size": "4"}, "size", "integer"),
        ({"frozen": 1.2}, "frozen", "less than or equal to 1"),
        ({"success_rate": -1}, "success_rate", ""),
        ({"turns": 5}, "turns", "a whole number from 6"),
        ({"most_actions": 0}, "most_actions", ""),
        ({"format_penalty": -1}, "format_penalty", ""),
        ({"words": "UDL"}, "words", "four different words"),
        ({"words": ["go", "go", "l", "r"]}, "words", ""),
        ({"words": {"up": "w", "down": "s", "left": "a", "rihgt": "d"}}, "words", ""),
        (
            {"symbols": {"hol": "H"}},
            "symbols",
            "different symbols of one length for any of you",
        ),
        ({"symbols": {"hole": "_"}}, "symbols", ""),
        ({"symbols": {"hole": "HH"}}, "symbols", ""),
        ({"board": ["SF", "G"]}, "board", ""),
        ({"board": ["SF", "FF"]}, "board", "with an S and a G"),
        ({"board": ["SF", "FG"], "size": 6}, "board", "left out where size are given"),
    ],
)
def test_invalid_options_are_refused(options, key, valid):
    check_option_error(lambda: FrozenLake(**options), key, valid)


def test_a_lake_that_cannot_be_drawn():
    with raises_with(OptionError, environment="frozen_lake", key="frozen", value=0.0):
        FrozenLake(size=8, frozen=0.0).reset(0)
