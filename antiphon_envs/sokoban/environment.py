"""Sokoban in text: push every box to a target. Boxes cannot be pulled, so a game may be lost before it ends."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from antiphon.core.rng import generator
from antiphon.tasks.environments.base import OptionError, require
from antiphon.tasks.environments.grid import DIRECTIONS, GridGame
from antiphon_envs.sokoban.expert import needs_moves, solve
from antiphon_envs.sokoban.generate import draw_room
from antiphon_envs.sokoban.room import Position, Room, cells_of

MOST_DRAWS = 1_000  # rooms that are drawn before the options are refused


class Sokoban(GridGame):
    """Push every box to a target. Drawn rooms can be solved within `turns`, one move a turn.

    By default only the solution earns a reward, 1, so that the mean reward is the success rate. gym-sokoban and ROLL have
    `solved_reward` 10, `target_reward` 1 and `step_penalty` 0.1.
    """

    class Config(GridGame.Config):
        """Options of `sokoban`."""

        SYMBOLS: ClassVar[Mapping[str, str]] = {
            "wall": "#",
            "floor": "_",
            "target": "O",
            "box": "X",
            "box on target": "√",
            "you": "P",
            "you on target": "S",
        }

        size: int | Sequence[int] = 6
        """Cells on a side with the walls, or height and width."""
        boxes: int = Field(1, ge=1)
        pulls: int = Field(40, ge=1)
        """Most pulls by which a room is mixed from its solution: more are harder."""
        least_moves: int = Field(4, ge=1)
        """Fewest moves of a shortest solution; rooms with a shorter one are drawn again."""
        board: Sequence[str] | None = None
        """Rows of characters as in `SYMBOLS`, with a wall around, instead of a drawn room."""
        solved_reward: float = Field(1.0, ge=0)
        target_reward: float = Field(0.0, ge=0)
        """Reward of each box that reaches a target; lost again when a box leaves one."""
        step_penalty: float = Field(0.0, ge=0)
        """Cost of each move, also one against a wall."""
        turns: int = Field(50, ge=1)

        @property
        def sides(self) -> tuple[int, int]:
            """Height and width."""
            return (self.size, self.size) if isinstance(self.size, int) else (self.size[0], self.size[1])

        @model_validator(mode="after")
        def _check(self) -> Self:
            sides = [self.size] * 2 if isinstance(self.size, int) else list(self.size)
            fits = len(sides) == 2 and all(4 <= side <= 64 for side in sides)
            require(fits, "size", self.size, "a whole number from 4 to 64, or two: height and width")
            most = ((sides[0] - 2) * (sides[1] - 2) - 1) // 2
            require(self.boxes <= most, "boxes", self.boxes, f"a whole number from 1 to {most}")
            valid = f"a whole number from 1 to {self.turns}"
            require(self.least_moves <= self.turns, "least_moves", self.least_moves, valid)
            if self.board is not None:
                read_board(self.board, self.SYMBOLS)
                unused = sorted({"size", "boxes", "pulls", "least_moves"} & self.model_fields_set)
                require(not unused, "board", list(self.board), f"left out where {', '.join(unused)} are given")
            return self

    config: Config
    name: ClassVar[str] = "sokoban"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._plan: list[tuple[Position, int]] = []  # positions to come and the move in each, the next one last
        self._unsolvable = False  # which no move changes

    def _start(self, seed: int) -> None:
        board, self._plan, self._unsolvable = self.config.board, [], False
        self._now = self._draw_position(seed) if board is None else read_board(board, self.config.SYMBOLS)
        room = self._now.room
        self._ground = "".join(
            "#_O"[(room.floor >> cell & 1) + (room.targets >> cell & 1)] for cell in range(room.height * room.width)
        )

    def _draw_position(self, seed: int) -> Position:
        config, random = self.config, generator(seed, self.name)
        height, width = config.sides
        for _ in range(MOST_DRAWS):
            start = draw_room(random, height, width, config.boxes, config.pulls, config.turns)
            if start is not None and needs_moves(start, config.least_moves):
                return start
        raise OptionError(
            f"environment {self.name!r}: none of {MOST_DRAWS} drawn rooms has a solution for size {config.size}, boxes "
            f"{config.boxes}, turns {config.turns} and least_moves {config.least_moves}: have larger rooms, fewer boxes or "
            "easier games",
            environment=self.name,
            key="size",
            value=config.size,
        )

    def _goal(self) -> str:
        every = "every box to a target" if self._now.boxes.bit_count() > 1 else "the box to the target"
        return f"This is Sokoban. Push {every}; boxes cannot be pulled, and only one is pushed at a time."

    def _board_rows(self) -> list[str]:
        cells, width = list(self._ground), self._now.room.width
        for things, signs in ((self._now.boxes, "X√"), (self._now.player, "PS")):
            for thing in cells_of(things):
                at = thing.bit_length() - 1
                cells[at] = signs[self._ground[at] == "O"]
        return ["".join(cells[start : start + width]) for start in range(0, len(cells), width)]

    def _move(self, direction: str) -> float:
        room, before = self._now.room, self._now
        player, boxes = room.move(before.player, before.boxes, room.steps[DIRECTIONS.index(direction)])
        self._now = Position(room, player, boxes)
        gained = (boxes & room.targets).bit_count() - (before.boxes & room.targets).bit_count()
        config = self.config
        return config.target_reward * gained - config.step_penalty + config.solved_reward * self._is_won()

    def _is_won(self) -> bool:
        return self._now.boxes == self._now.room.targets

    def _expert_direction(self) -> str:
        while self._plan and self._plan[-1][0] != self._now:
            self._plan.pop()
        if not (self._plan or self._unsolvable):
            self._plan = self._solve()
            self._unsolvable = not self._plan
        return DIRECTIONS[self._plan[-1][1]] if self._plan else DIRECTIONS[0]

    def _solve(self) -> list[tuple[Position, int]]:
        """Find a shortest solution: positions and the move in each, the next one last; empty if there is none."""
        plan, at = [], self._now
        for way in solve(self._now) or ():
            plan.append((at, way))
            at = Position(at.room, *at.room.move(at.player, at.boxes, at.room.steps[way]))
        return plan[::-1]


def read_board(board: Sequence[str], symbols: Mapping[str, str]) -> Position:
    """Read the option `board` into a position."""
    text, widths = "".join(board), {len(row) for row in board}
    cells = {sign: sum(1 << cell for cell, each in enumerate(text) if each == sign) for sign in symbols.values()}
    boxes, player = cells["X"] | cells["√"], cells["P"] | cells["S"]
    targets = cells["O"] | cells["√"] | cells["S"]
    readable = len(widths) == 1 and set(text) <= set(cells) and player.bit_count() == 1
    readable = readable and boxes.bit_count() == targets.bit_count() > 0 and boxes != targets
    edges = {*board[0], *board[-1], *(row[0] + row[-1] for row in board)} if readable else {""}
    signs = ", ".join(f"{sign} {thing}" for thing, sign in symbols.items())
    valid = f"rows of one length in a wall, with one player and as many boxes as targets, of {signs}"
    require(readable and set("".join(edges)) == {"#"}, "board", list(board), valid)
    floor = sum(cells.values()) - cells["#"]
    return Position(Room(len(board), len(board[0]), floor, targets), player, boxes)
