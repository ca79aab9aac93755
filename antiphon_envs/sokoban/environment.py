"""Sokoban in text: push every box to a target. Boxes cannot be pulled, so that a game may be lost before it ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from antiphon.core.errors import ConfigError
from antiphon.core.rng import generator
from antiphon.tasks.environments.grid import DIRECTIONS, GridGame
from antiphon.tasks.environments.options import require, require_number, require_whole
from antiphon_envs.sokoban.rooms import Position, Room, bits, draw_room, solve, takes

_DRAWS = 1_000  # of rooms, before one that will do is given up


@dataclass(kw_only=True, eq=False)
class Sokoban(GridGame):
    """Push `boxes` boxes to as many targets. The drawn room can be solved, within `turns`, one move a turn.

    By default all that counts is to solve it, worth 1: one comparable number for any room, and the mean reward is the success
    rate. gym-sokoban and ROLL have `solved_reward` 10, `target_reward` 1 and `step_penalty` 0.1. `ConfigError` for options
    that no room has.
    """

    size: int | Sequence[int] = 6
    """Cells on a side, or height and width; with the walls around."""
    boxes: int = 1
    pulls: int = 40
    """Most pulls by which a room is mixed from its solution: the more, the harder."""
    least_moves: int = 4
    """That solve a room, which is drawn again if fewer do; without such a bound many small rooms are a push from solved."""
    board: Sequence[str] | None = None
    """Rows of characters as in `SYMBOLS`, with a wall around, instead of a room that is drawn."""
    solved_reward: float = 1.0
    target_reward: float = 0.0
    """For each box that comes to a target; it is lost again with a box that leaves one."""
    step_penalty: float = 0.0
    """What each move costs, also one against a wall."""
    turns: int = 50

    NAME: ClassVar[str] = "sokoban"
    SYMBOLS: ClassVar[Mapping[str, str]] = {
        "wall": "#",
        "floor": "_",
        "target": "O",
        "box": "X",
        "box on target": "√",
        "you": "P",
        "you on target": "S",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sides = (self.size, self.size) if isinstance(self.size, int) else tuple(self.size)
        kept = len(self._sides) == 2 and all(isinstance(side, int) and 4 <= side <= 64 for side in self._sides)
        require(kept, self.NAME, "size", self.size, "a whole number from 4 to 64, or two: height and width")
        require_whole(self.NAME, "boxes", self.boxes, 1, ((self._sides[0] - 2) * (self._sides[1] - 2) - 1) // 2)
        require_whole(self.NAME, "pulls", self.pulls, 1)
        require_whole(self.NAME, "least_moves", self.least_moves, 1, self.turns)
        for option in ("solved_reward", "target_reward", "step_penalty"):
            require_number(self.NAME, option, getattr(self, option), 0)
        if self.board is not None:
            self._read_board(self.board)
            drawing = {"size": 6, "boxes": 1, "pulls": 40, "least_moves": 4}
            unused = [option for option, default in drawing.items() if getattr(self, option) != default]
            require(not unused, self.NAME, "board", list(self.board), f"left out where {', '.join(unused)} are given")
        self._plan: list[tuple[Position, int]] = []  # positions to come and what to do there, the next one last
        self._hopeless = False  # whether nothing solves the room any more; that does not change

    def _read_board(self, board: Sequence[str]) -> Position:
        text, widths = "".join(board), {len(row) for row in board}
        cells = {
            sign: sum(1 << cell for cell, each in enumerate(text) if each == sign) for sign in self.SYMBOLS.values()
        }
        boxes, player = cells["X"] | cells["√"], cells["P"] | cells["S"]
        targets = cells["O"] | cells["√"] | cells["S"]
        kept = len(widths) == 1 and set(text) <= set(cells) and player.bit_count() == 1
        kept = kept and boxes.bit_count() == targets.bit_count() > 0 and boxes != targets
        edges = {*board[0], *board[-1], *(row[0] + row[-1] for row in board)} if kept else {""}
        signs = ", ".join(f"{sign} {thing}" for thing, sign in self.SYMBOLS.items())
        valid = f"rows of one length in a wall, with one player and as many boxes as targets, of {signs}"
        require(kept and set("".join(edges)) == {"#"}, self.NAME, "board", list(board), valid)
        floor = sum(cells.values()) - cells["#"]
        return Position(Room(len(board), len(board[0]), floor, targets), player, boxes)

    def _begin(self, seed: int) -> None:
        self._now = self._drawn(seed) if self.board is None else self._read_board(self.board)
        room = self._now.room
        self._ground = "".join(
            "#_O"[(room.floor >> cell & 1) + (room.targets >> cell & 1)] for cell in range(room.height * room.width)
        )

    def _drawn(self, seed: int) -> Position:
        random, (height, width) = generator(seed, self.NAME), self._sides
        for _ in range(_DRAWS):
            start = draw_room(random, height, width, self.boxes, self.pulls, self.turns)
            if start is not None and takes(start, self.least_moves):
                return start
        raise ConfigError(
            f"environment {self.NAME!r}: no room of {_DRAWS} drawn will do with size {self.size}, boxes {self.boxes}, turns "
            f"{self.turns} and least_moves {self.least_moves}: have larger rooms, fewer boxes or easier games"
        )

    def _aim(self) -> str:
        every = "every box to a target" if self._now.boxes.bit_count() > 1 else "the box to the target"
        return f"This is Sokoban. Push {every}; boxes cannot be pulled, and only one is pushed at a time."

    def _rows(self) -> list[str]:
        cells, width = list(self._ground), self._now.room.width
        for things, signs in ((self._now.boxes, "X√"), (self._now.player, "PS")):
            for thing in bits(things):
                at = thing.bit_length() - 1
                cells[at] = signs[self._ground[at] == "O"]
        return ["".join(cells[start : start + width]) for start in range(0, len(cells), width)]

    def _move(self, direction: str) -> float:
        room, before = self._now.room, self._now
        player, boxes = room.moved(before.player, before.boxes, room.steps[DIRECTIONS.index(direction)])
        self._now = Position(room, player, boxes)
        came = (boxes & room.targets).bit_count() - (before.boxes & room.targets).bit_count()
        return self.target_reward * came - self.step_penalty + self.solved_reward * self._won()

    def _won(self) -> bool:
        return self._now.boxes == self._now.room.targets

    def _way(self) -> str:
        while self._plan and self._plan[-1][0] != self._now:
            self._plan.pop()
        if not (self._plan or self._hopeless):
            self._plan = self._planned()
            self._hopeless = not self._plan
        return DIRECTIONS[self._plan[-1][1]] if self._plan else DIRECTIONS[0]

    def _planned(self) -> list[tuple[Position, int]]:
        """The positions of a shortest solution and the way to take in each, the next one last; none if there is no solution."""
        plan, at = [], self._now
        for way in solve(self._now) or ():
            plan.append((at, way))
            at = Position(at.room, *at.room.moved(at.player, at.boxes, at.room.steps[way]))
        return plan[::-1]
