"""FrozenLake in text: cross the ice, keep off the holes.

Boards and dynamics are those of Gymnasium's FrozenLake-v1: a board of which each cell but start and goal is frozen with a
given probability, drawn again until the goal can be reached, and ice that carries one off sideways if it is slippery.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from antiphon.core.errors import ConfigError
from antiphon.core.rng import generator
from antiphon.tasks.environments.grid import DIRECTIONS, GridGame
from antiphon.tasks.environments.options import require, require_number, require_whole

_DRAWS = 10_000  # of boards, before one that can be won is given up
_SIDEWAYS = {"up": ("left", "right"), "down": ("left", "right"), "left": ("up", "down"), "right": ("up", "down")}
_HASTE = 1e-7  # what a turn costs the expert: of two ways that win as often it takes the shorter


@dataclass(kw_only=True, eq=False)
class FrozenLake(GridGame):
    """Reach the goal, worth 1; a hole ends the game, worth 0. `ConfigError` for options that no lake has."""

    size: int = 4
    """Cells on a side."""
    frozen: float = 0.8
    """Probability that a cell is no hole."""
    slippery: bool = False
    success_rate: float = 1 / 3
    """Probability that one moves as meant on slippery ice; either side has half of the rest."""
    random_places: bool = False
    """Start and goal anywhere, rather than top left and bottom right."""
    board: Sequence[str] | None = None
    """Rows of S (start), F (frozen), H (hole) and G (goal), instead of a board that is drawn."""
    turns: int = 20

    NAME: ClassVar[str] = "frozen_lake"
    SYMBOLS: ClassVar[Mapping[str, str]] = {"you": "P", "ice": "_", "hole": "O", "goal": "G"}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole(self.NAME, "size", self.size, 2, 32)
        require_number(self.NAME, "frozen", self.frozen, 0, 1)
        require_number(self.NAME, "success_rate", self.success_rate, 0, 1)
        shortest = 1 if self.board or self.random_places else 2 * (self.size - 1)
        require_whole(self.NAME, "turns", self.turns, shortest)
        if self.board is not None:
            self._check_board(self.board)
        self._policy: npt.NDArray[np.intp] | None = None

    def outcomes(self, cell: int, direction: str) -> list[tuple[float, int]]:
        """Where a move from `cell` leads to, and how probably; cells are counted along rows, ends are left no more."""
        if self._cells[cell] in "HG":
            return [(1.0, cell)]
        if not self.slippery:
            return [(1.0, self._beside(cell, direction))]
        aside = (1 - self.success_rate) / 2
        ways = ((self.success_rate, direction), *((aside, side) for side in _SIDEWAYS[direction]))
        return [(probability, self._beside(cell, way)) for probability, way in ways]

    def _check_board(self, board: Sequence[str]) -> None:
        text, widths = "".join(board), {len(row) for row in board}
        kept = len(widths) == 1 and set(text) <= set("SFHG") and "S" in text and "G" in text
        require(kept, self.NAME, "board", list(board), "rows of one length of S, F, H, G, with an S and a G")
        drawing = {"size": 4, "frozen": 0.8, "random_places": False}
        unused = [option for option, default in drawing.items() if getattr(self, option) != default]
        require(not unused, self.NAME, "board", list(board), f"left out where {', '.join(unused)} are given")

    def _begin(self, seed: int) -> None:
        random = generator(seed, self.NAME)
        self._random, self._policy = random, None
        if self.board is None:
            self._draw(random)
            return
        self._cells, self._width = "".join(self.board), len(self.board[0])
        self._at = int(random.choice([cell for cell, kind in enumerate(self._cells) if kind == "S"]))

    def _draw(self, random: np.random.Generator) -> None:
        self._width, cells = self.size, self.size**2
        for _ in range(_DRAWS):
            places = random.choice(cells, 2, replace=False) if self.random_places else (0, cells - 1)
            kinds = np.where(random.random(cells) < self.frozen, "F", "H")
            kinds[places[0]], kinds[places[1]] = "S", "G"
            self._cells, self._at = "".join(kinds), int(places[0])
            if self._reaches_goal(self.turns):
                return
        raise ConfigError(
            f"environment {self.NAME!r}: no board of {_DRAWS} drawn can be won with size {self.size}, frozen {self.frozen} "
            f"and turns {self.turns}: raise frozen or turns"
        )

    def _reaches_goal(self, moves: int) -> bool:
        """Whether so many moves can lead from here to a goal."""
        edge, seen = {self._at}, {self._at}
        for _ in range(moves):
            edge = {self._beside(cell, direction) for cell in edge for direction in DIRECTIONS} - seen
            if any(self._cells[cell] == "G" for cell in edge):
                return True
            edge = {cell for cell in edge if self._cells[cell] != "H"}
            seen |= edge
        return False

    def _beside(self, cell: int, direction: str) -> int:
        """The next cell that way; the same at the edge of the lake."""
        row, column = divmod(cell, self._width)
        match direction:
            case "up":
                return cell - self._width if row else cell
            case "down":
                return cell + self._width if cell + self._width < len(self._cells) else cell
            case "left":
                return cell - 1 if column else cell
            case _:
                return cell + 1 if column + 1 < self._width else cell

    def _aim(self) -> str:
        slippery = " The ice is slippery: you may move sideways instead." if self.slippery else ""
        return f"You cross a frozen lake. Reach the goal; a hole ends the game.{slippery}"

    def _rows(self) -> list[str]:
        signs = self._cells.translate(str.maketrans("SFH", "__O"))
        signs = f"{signs[: self._at]}P{signs[self._at + 1 :]}"
        return [signs[start : start + self._width] for start in range(0, len(signs), self._width)]

    def _move(self, direction: str) -> float:
        ways = self.outcomes(self._at, direction)
        drawn = self._random.random() if len(ways) > 1 else 0.0
        for probability, cell in ways:
            self._at = cell
            drawn -= probability
            if drawn < 0:
                break
        return float(self._won())

    def _won(self) -> bool:
        return self._cells[self._at] == "G"

    def _lost(self) -> bool:
        return self._cells[self._at] == "H"

    def _way(self) -> str:
        if self._policy is None:
            self._policy = self._planned()
        return DIRECTIONS[self._policy[self._left - 1, self._at]]

    def _planned(self) -> npt.NDArray[np.intp]:
        """The direction that wins most often, by backward induction: [turns, cells], the last turn first."""
        cells = range(len(self._cells))
        leads = np.zeros(
            (len(cells), len(DIRECTIONS), len(cells))
        )  # probability to get from a cell, by a direction, to a cell
        for cell in cells:
            for way, direction in enumerate(DIRECTIONS):
                for probability, to in self.outcomes(cell, direction):
                    leads[cell, way, to] += probability
        ends = np.array([kind in "HG" for kind in self._cells])
        value = goal = np.array([float(kind == "G") for kind in self._cells])
        policy = []
        for _ in range(self.turns):
            worth = leads @ value - _HASTE  # [cells, directions]
            policy.append(worth.argmax(axis=1))
            value = np.where(ends, goal, worth.max(axis=1))
        return np.stack(policy)
