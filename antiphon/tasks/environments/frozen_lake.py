"""FrozenLake in text: cross the ice and keep off the holes.

Boards and dynamics are those of Gymnasium's FrozenLake-v1: every cell but start and goal is frozen with a given probability,
boards are drawn until the goal can be reached, and slippery ice may move the player sideways.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from antiphon.core.rng import generator
from antiphon.tasks.environments.base import OptionError, require
from antiphon.tasks.environments.grid import DIRECTIONS, GridGame

MOST_DRAWS = 10_000  # boards that are drawn before the options are refused
TURN_COST = 1e-7  # to the expert: of two policies that win as often it takes the shorter
_SIDEWAYS = {"up": ("left", "right"), "down": ("left", "right"), "left": ("up", "down"), "right": ("up", "down")}


class FrozenLake(GridGame):
    """Reach the goal, which earns 1; a hole ends the game and earns 0."""

    class Config(GridGame.Config):
        """Options of `frozen_lake`."""

        SYMBOLS: ClassVar[Mapping[str, str]] = {"you": "P", "ice": "_", "hole": "O", "goal": "G"}

        size: int = Field(4, ge=2, le=32)
        """Cells on a side."""
        frozen: float = Field(0.8, ge=0, le=1)
        """Probability that a cell is frozen, not a hole."""
        slippery: bool = False
        success_rate: float = Field(1 / 3, ge=0, le=1)
        """Probability of the intended move on slippery ice; each side has half of the rest."""
        random_places: bool = False
        """Draw start and goal anywhere, instead of top left and bottom right."""
        board: Sequence[str] | None = None
        """Rows of S (start), F (frozen), H (hole) and G (goal), instead of a drawn board."""
        turns: int = Field(20, ge=1)

        @model_validator(mode="after")
        def _check(self) -> Self:
            shortest = 1 if self.board or self.random_places else 2 * (self.size - 1)
            require(self.turns >= shortest, "turns", self.turns, f"a whole number from {shortest}")
            if self.board is not None:
                text, widths = "".join(self.board), {len(row) for row in self.board}
                readable = len(widths) == 1 and set(text) <= set("SFHG") and "S" in text and "G" in text
                valid = "rows of one length of S, F, H, G, with an S and a G"
                require(readable, "board", list(self.board), valid)
                unused = sorted({"size", "frozen", "random_places"} & self.model_fields_set)
                require(not unused, "board", list(self.board), f"left out where {', '.join(unused)} are given")
            return self

    config: Config
    name: ClassVar[str] = "frozen_lake"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._policy: npt.NDArray[np.intp] | None = None

    def outcomes(self, cell: int, direction: str) -> list[tuple[float, int]]:
        """Return the probability and the cell of each outcome of a move; cells are numbered along rows."""
        if self._cells[cell] in "HG":
            return [(1.0, cell)]
        if not self.config.slippery:
            return [(1.0, self._neighbor(cell, direction))]
        rate = self.config.success_rate
        ways = ((rate, direction), *(((1 - rate) / 2, side) for side in _SIDEWAYS[direction]))
        return [(probability, self._neighbor(cell, way)) for probability, way in ways]

    def _start(self, seed: int) -> None:
        random = generator(seed, self.name)
        self._random, self._policy = random, None
        board = self.config.board
        if board is None:
            self._draw_board(random)
            return
        self._cells, self._width = "".join(board), len(board[0])
        self._at = int(random.choice([cell for cell, kind in enumerate(self._cells) if kind == "S"]))

    def _draw_board(self, random: np.random.Generator) -> None:
        config = self.config
        self._width, cells = config.size, config.size**2
        for _ in range(MOST_DRAWS):
            places = random.choice(cells, 2, replace=False) if config.random_places else (0, cells - 1)
            kinds = np.where(random.random(cells) < config.frozen, "F", "H")
            kinds[places[0]], kinds[places[1]] = "S", "G"
            self._cells, self._at = "".join(kinds), int(places[0])
            if self._can_reach_goal(config.turns):
                return
        raise OptionError(
            f"environment {self.name!r}: none of {MOST_DRAWS} drawn boards can be won with size {config.size}, frozen "
            f"{config.frozen} and turns {config.turns}: raise frozen or turns",
            environment=self.name,
            key="frozen",
            value=config.frozen,
        )

    def _can_reach_goal(self, moves: int) -> bool:
        """Return True if at most so many moves lead from here to a goal."""
        edge, seen = {self._at}, {self._at}
        for _ in range(moves):
            edge = {self._neighbor(cell, direction) for cell in edge for direction in DIRECTIONS} - seen
            if any(self._cells[cell] == "G" for cell in edge):
                return True
            edge = {cell for cell in edge if self._cells[cell] != "H"}
            seen |= edge
        return False

    def _neighbor(self, cell: int, direction: str) -> int:
        """Return the next cell in a direction; the same cell at the edge of the lake."""
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

    def _goal(self) -> str:
        slippery = " The ice is slippery: you may move sideways instead." if self.config.slippery else ""
        return f"You cross a frozen lake. Reach the goal; a hole ends the game.{slippery}"

    def _board_rows(self) -> list[str]:
        signs = self._cells.translate(str.maketrans("SFH", "__O"))
        signs = f"{signs[: self._at]}P{signs[self._at + 1 :]}"
        return [signs[start : start + self._width] for start in range(0, len(signs), self._width)]

    def _move(self, direction: str) -> float:
        outcomes = self.outcomes(self._at, direction)
        drawn = self._random.random() if len(outcomes) > 1 else 0.0
        for probability, cell in outcomes:
            self._at = cell
            drawn -= probability
            if drawn < 0:
                break
        return float(self._is_won())

    def _is_won(self) -> bool:
        return self._cells[self._at] == "G"

    def _is_lost(self) -> bool:
        return self._cells[self._at] == "H"

    def _expert_direction(self) -> str:
        if self._policy is None:
            self._policy = self._solve()
        return DIRECTIONS[self._policy[self._turns_left - 1, self._at]]

    def _solve(self) -> npt.NDArray[np.intp]:
        """Find the direction that wins most often by backward induction: [turns, cells], the last turn first."""
        cells = range(len(self._cells))
        transitions = np.zeros((len(cells), len(DIRECTIONS), len(cells)))  # probability of cell -> cell by a direction
        for cell in cells:
            for way, direction in enumerate(DIRECTIONS):
                for probability, to in self.outcomes(cell, direction):
                    transitions[cell, way, to] += probability
        terminal = np.array([kind in "HG" for kind in self._cells])
        value = goal = np.array([float(kind == "G") for kind in self._cells])
        policy = []
        for _ in range(self.config.turns):
            action_values = transitions @ value - TURN_COST  # [cells, directions]
            policy.append(action_values.argmax(axis=1))
            value = np.where(terminal, goal, action_values.max(axis=1))
        return np.stack(policy)
