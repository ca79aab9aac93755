"""Sokoban: its rooms, its dynamics, its solver."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.tasks.environments.base import OptionError
from antiphon_envs.sokoban.environment import Sokoban
from tests.raising import raises_with
from tests.unit.tasks.worlds import at_random, check_contract, check_option_error, expert, play, success_rate

CORRIDOR = ("#######", "#P_XO_#", "#######")
TWO = ("######", "#_O__#", "#_XX_#", "#_S__#", "######")
ROLL = {"solved_reward": 10, "target_reward": 1, "step_penalty": 0.1}


class Reference:
    """Sokoban over lists of lists, one character a cell: what the bits are checked against."""

    WAYS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
    ON, OFF = {"_": "O", "X": "√", "P": "S"}, {"O": "_", "√": "X", "S": "P"}

    def __init__(self, board):
        self.rows = [list(row) for row in board]

    def key(self):
        return "\n".join(map("".join, self.rows))

    def move(self, way):
        down, right = self.WAYS[way]
        ((row, column),) = [(r, c) for r, cells in enumerate(self.rows) for c, cell in enumerate(cells) if cell in "PS"]
        cells = [(row + i * down, column + i * right) for i in range(3)]
        inside = [(r, c) for r, c in cells if 0 <= r < len(self.rows) and 0 <= c < len(self.rows[0])]
        plain = [self.OFF.get(self.rows[r][c], self.rows[r][c]) for r, c in inside]
        if plain[1] == "_":
            after = ["_", "P", *plain[2:]]
        elif plain[1] == "X" and plain[2:] == ["_"]:
            after = ["_", "P", "X"]
        else:
            return
        for (r, c), thing in zip(inside, after, strict=True):
            self.rows[r][c] = self.ON[thing] if self.rows[r][c] in self.OFF and thing in self.ON else thing

    def shortest(self):
        """The fewest moves to its solution, by breadth-first search; None if there is none."""
        edge, seen, moves = [self.key()], {self.key()}, 0
        while edge:
            if any("X" not in key for key in edge):
                return moves
            found = []
            for key in edge:
                for way in self.WAYS:
                    after = Reference(key.split("\n"))
                    after.move(way)
                    if after.key() not in seen:
                        seen.add(after.key())
                        found.append(after.key())
            edge, moves = found, moves + 1
        return None


OPTIONS = [{}, {"size": 8, "boxes": 2}, {"size": (6, 9), "boxes": 3, "turns": 80}]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_expert_solves_every_room(options):
    for seed in range(100):
        room = Sokoban(**options)
        board = room.reset(seed)[1]["state_key"]
        boxes = options.get("boxes", 1)
        assert board.count("X") == board.count("O") + board.count("S") == boxes and "√" not in board
        steps = play(Sokoban(**options), seed, expert)
        assert steps[-1][1:3] == (1.0, True) and steps[-1][4]["success"]
        assert 4 <= len(steps) <= room.config.turns


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_the_expert_takes_the_fewest_moves(options):
    for seed in range(12):
        board = Sokoban(**options).reset(seed)[1]["state_key"].split("\n")
        assert len(play(Sokoban(**options), seed, expert)) == Reference(board).shortest()


def test_rates_of_a_random_policy():
    assert 0.05 < success_rate(Sokoban, at_random(0), 200) < 0.25
    assert success_rate(lambda: Sokoban(size=8, boxes=2), at_random(0), 60) < 0.05


def test_rooms_differ_and_have_room():
    boards = [Sokoban().reset(seed)[1]["state_key"] for seed in range(200)]
    assert len(set(boards)) > 190
    floor = [36 - board.count("#") - 5 for board in boards]  # 5 characters are new lines
    assert np.mean(floor) > 6


def test_moves_are_those_of_the_reference():
    random = np.random.default_rng(0)
    for seed in range(30):
        room = Sokoban(size=7, boxes=2)
        reference = Reference(room.reset(seed)[1]["state_key"].split("\n"))
        for way in random.choice(list(Reference.WAYS), 50):
            before = reference.key()
            reference.move(way)
            *_, terminated, _, info = room.step(str(way))
            assert info["state_key"] == reference.key()
            assert info["effective"] == (reference.key() != before)
            assert terminated == ("X" not in reference.key())
            if terminated:
                break


def test_rewards_as_in_gym_sokoban():
    room = Sokoban(board=TWO, **ROLL)
    assert room.reset(0)[1]["state_key"].split("\n") == list(TWO)
    first = room.step("up")  # the left one goes to its target
    assert first[0].split("\n")[1:4] == ["#_√__#", "#_PX_#", "#_O__#"]
    assert first[1] == pytest.approx(0.9)
    assert room.step("up")[1] == pytest.approx(-0.1)  # against the box, which stands at the wall
    for way in ("left", "up"):
        assert room.step(way)[1] == pytest.approx(-0.1)
    assert room.step("right")[1] == pytest.approx(-1.1)  # off it again
    corridor = Sokoban(board=CORRIDOR, **ROLL)
    corridor.reset(0)
    assert corridor.step("right")[1] == pytest.approx(-0.1)
    observation, reward, terminated, truncated, info = corridor.step("right")
    assert (observation, terminated, truncated, info["success"]) == ("#######\n#__P√_#\n#######", True, False, True)
    assert reward == pytest.approx(10.9)


def test_a_game_in_other_symbols():
    signs = {
        "wall": "W",
        "floor": ".",
        "target": "t",
        "box": "b",
        "box on target": "B",
        "you": "y",
        "you on target": "Y",
    }
    room = Sokoban(board=CORRIDOR, symbols=signs, words="UDLR", row_separator="/", instructions=False, most_actions=2)
    assert room.reset(0)[0] == "WWWWWWW/Wy.bt.W/WWWWWWW"
    assert room.step("R,R")[:3] == ("WWWWWWW/W..yB.W/WWWWWWW", 1.0, True)
    text = Sokoban(size=8, boxes=2).reset(0)[0]
    assert "every box to a target" in text and "√ box on target" in text and "You have 50 turns." in text


def test_a_lost_game_has_an_expert_that_says_something():
    lost = Sokoban(board=("#######", "#PXO_X#", "#___O_#", "#######"), turns=4)
    lost.reset(0)
    assert [lost.step(lost.expert())[3] for _ in range(4)] == [False, False, False, True]


def test_the_expert_finds_back_from_where_others_went():
    for seed in range(20):
        room, policy = Sokoban(size=8, turns=200), at_random(seed)
        room.reset(seed)
        key = ""
        for _ in range(3):
            key = room.step(policy(room))[4]["state_key"]
            room.expert()
        wanted = Reference(key.split("\n")).shortest()
        if wanted:
            for _ in range(wanted - 1):
                assert not room.step(room.expert())[2]
            assert room.step(room.expert())[2]


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["up", "Down", "LEFT", "right", "up, left", "?"]) | st.text(max_size=9), max_size=25))
def test_anything_can_be_said(actions):
    for options in ({"size": 7, "boxes": 2}, {"most_actions": 2, "format_penalty": 0.5, **ROLL}):
        for step in check_contract(lambda o=options: Sokoban(**o), 11, actions):
            key = step[4]["state_key"]
            assert key.count("P") + key.count("S") == 1
            assert key.count("X") + key.count("√") == options.get("boxes", 1)
            assert key.count("O") + key.count("√") + key.count("S") == options.get("boxes", 1)
            assert step[4]["valid"] or step[1] == -options.get("format_penalty", 0.0)


@pytest.mark.parametrize(
    ("options", "key", "valid"),
    [
        ({"size": 3}, "size", "a whole number from 4 to 64, or two"),
        ({"size": (6, 6, 6)}, "size", ""),
        ({"boxes": 0}, "boxes", "greater than or equal to 1"),
        ({"boxes": 8}, "boxes", "a whole number from 1 to 7"),
        ({"pulls": 0}, "pulls", ""),
        ({"least_moves": 51}, "least_moves", "a whole number from 1 to 50"),
        ({"step_penalty": -1}, "step_penalty", ""),
        ({"board": ["#####", "#PXO_", "#####"]}, "board", ""),
        ({"board": ["#####", "#P_O#", "#####"]}, "board", "as many boxes as targets"),
        ({"board": CORRIDOR, "boxes": 2}, "board", "left out where boxes are given"),
    ],
)
def test_invalid_options_are_refused(options, key, valid):
    check_option_error(lambda: Sokoban(**options), key, valid)


def test_a_room_that_cannot_be_drawn():
    with raises_with(OptionError, environment="sokoban", key="size", value=4):
        Sokoban(size=4, least_moves=45).reset(0)
