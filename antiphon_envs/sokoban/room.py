"""Rooms and positions of Sokoban as bit sets.

A set of cells is an integer with one bit for each cell, row by row; the walls around a room keep shifts inside.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Room:
    """The parts of a room that do not change. Without slots, because `push_distances` is cached."""

    height: int
    width: int
    floor: int
    targets: int

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """Changes of a cell's number by a move up, down, left and right."""
        return -self.width, self.width, -1, 1

    def move(self, player: int, boxes: int, step: int) -> tuple[int, int]:
        """Return player (one bit) and boxes after a move, which pushes one box at most; unchanged if it is blocked."""
        ahead = shift(player, step)
        if not ahead & self.floor:
            return player, boxes
        if ahead & boxes:
            beyond = shift(ahead, step)
            if not beyond & self.floor & ~boxes:
                return player, boxes
            boxes ^= ahead | beyond
        return ahead, boxes

    def reachable(self, player: int, boxes: int) -> Iterator[int]:
        """Yield the cells that the player can walk to in at most 0, 1, 2, ... moves, until they grow no more."""
        free, seen, grown = self.floor & ~boxes, 0, player
        while grown != seen:
            yield grown
            seen = grown
            for step in self.steps:
                grown |= shift(seen, step) & free

    @cached_property
    def push_distances(self) -> dict[int, int]:
        """Fewest pushes from each cell (one bit) to a target if nothing is in the way; without cells that reach none."""
        found, edge, count = dict.fromkeys(cells_of(self.targets), 0), self.targets, 0
        while edge:
            count += 1
            # Backwards, a push is a pull: the player stands one cell further than the box comes from.
            pulled = [shift(edge, step) & self.floor & shift(self.floor, -step) for step in self.steps]
            edge = 0
            for cell in cells_of(pulled[0] | pulled[1] | pulled[2] | pulled[3]):
                if cell not in found:
                    found[cell] = count
                    edge |= cell
        return found


@dataclass(frozen=True, slots=True)
class Position:
    """A room with its player (one bit) and boxes."""

    room: Room
    player: int
    boxes: int


def shift(cells: int, step: int) -> int:
    """Move each cell by a step."""
    return cells << step if step > 0 else cells >> -step


def cells_of(cells: int) -> Iterator[int]:
    """Yield each cell of a set as a set of its own, from the first."""
    while cells:
        yield cells & -cells
        cells &= cells - 1
