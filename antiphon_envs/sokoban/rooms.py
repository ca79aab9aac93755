"""Sokoban's rooms: how they are drawn, so that each can be solved, and how they are solved.

Sets of cells are whole numbers with a bit for each cell, row by row; walls all around keep shifts inside. Drawing follows the
idea of Racanière et al. 2017, "Imagination-Augmented Agents" (appendix), that gym-sokoban made known: carve a room by walking
at random, put boxes on targets, and play backwards, pulling.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

_STEPS_A_SIDE = 1.7  # of the walk that carves, for each cell of height and width; this and the next as in gym-sokoban
_TURN = 0.35  # how often the walk changes its direction
_BESIDE = 2  # cells that are carved beside each of the walk's, the same one perhaps

_State = tuple[int, int]  # the player (one bit), and boxes


@dataclass(frozen=True)
class Room:
    """What does not change: floor and targets. Not slotted, for what is derived from them is kept."""

    height: int
    width: int
    floor: int
    targets: int

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """What a move up, down, left, right adds to the number of a cell."""
        return -self.width, self.width, -1, 1

    def moved(self, player: int, boxes: int, step: int) -> tuple[int, int]:
        """Player (one bit) and boxes after a move, which may push one box and no more; unchanged if it cannot be."""
        ahead = shifted(player, step)
        if not ahead & self.floor:
            return player, boxes
        if ahead & boxes:
            beyond = shifted(ahead, step)
            if not beyond & self.floor & ~boxes:
                return player, boxes
            boxes ^= ahead | beyond
        return ahead, boxes

    def walks(self, player: int, boxes: int) -> Iterator[int]:
        """Cells that can be walked to in at most 0, 1, 2, ... moves, until there are no more."""
        free, seen, grown = self.floor & ~boxes, 0, player
        while grown != seen:
            yield grown
            seen = grown
            for step in self.steps:
                grown |= shifted(seen, step) & free

    @cached_property
    def pushes(self) -> dict[int, int]:
        """For each cell (one bit) the pushes that take a box from there to a target, if nothing is in the way; cells from
        which a box never gets to one are missing."""
        found, edge, count = dict.fromkeys(bits(self.targets), 0), self.targets, 0
        while edge:
            count += 1
            # A box was pushed to where it is from the side that it would be pulled to, with the player one further.
            pulled = [shifted(edge, step) & self.floor & shifted(self.floor, -step) for step in self.steps]
            edge = 0
            for cell in bits(pulled[0] | pulled[1] | pulled[2] | pulled[3]):
                if cell not in found:
                    found[cell] = count
                    edge |= cell
        return found


@dataclass(frozen=True, slots=True)
class Position:
    """A drawn game."""

    room: Room
    player: int
    boxes: int


def shifted(cells: int, step: int) -> int:
    """Cells, each moved by a step."""
    return cells << step if step > 0 else cells >> -step


def bits(cells: int) -> Iterator[int]:
    """Each of them, from the first."""
    while cells:
        yield cells & -cells
        cells &= cells - 1


def draw_room(
    random: np.random.Generator, height: int, width: int, boxes: int, pulls: int, moves: int
) -> Position | None:
    """A game with no box on a target, that at most `moves` solve; None if this draw came to nothing. Of at most `pulls` random
    pulls it is the position with the boxes furthest away, in all, from targets."""
    floor = list(bits(_carved(random, height, width)))
    if len(floor) <= 2 * boxes:
        return None
    *targets, at = (floor[each] for each in random.choice(len(floor), boxes + 1, replace=False))
    room = Room(height, width, sum(floor), sum(targets))
    return _played_backwards(random, room, at, pulls, moves)


def _carved(random: np.random.Generator, height: int, width: int) -> int:
    """Floor that hangs together: the cells of a random walk, each with some beside it."""
    count = int(_STEPS_A_SIDE * (height + width))
    turns, ways = random.random(count) < _TURN, random.integers(4, size=(count, 1 + _BESIDE)).tolist()
    row, column, way = int(random.integers(1, height - 1)), int(random.integers(1, width - 1)), 0
    floor = 0

    def beside(way: int) -> tuple[int, int]:
        down, right = ((-1, 0), (1, 0), (0, -1), (0, 1))[way]
        return min(max(row + down, 1), height - 2), min(max(column + right, 1), width - 2)

    for turn, (new, *asides) in zip(turns, ways, strict=True):
        way = new if turn else way
        for down, right in ((row, column), *map(beside, asides)):
            floor |= 1 << down * width + right
        row, column = beside(way)
    return floor


def _played_backwards(random: np.random.Generator, room: Room, player: int, pulls: int, moves: int) -> Position | None:
    boxes, made, best, found = room.targets, 0, 0, Position(room, 0, 0)
    left = 0  # moves that are left for the player to walk somewhere else before the game begins
    for chance in random.random(pulls).tolist():
        layers = list(room.walks(player, boxes))
        possible = list(_pulls(room, boxes, layers[-1]))
        if not possible:
            break
        box, step = possible[int(chance * len(possible))]
        beside, beyond = shifted(box, step), shifted(box, 2 * step)
        made += 1 + next(count for count, layer in enumerate(layers) if layer & beside)
        if made > moves:
            break
        player, boxes = beyond, boxes ^ box ^ beside
        away = sum(room.pushes[each] for each in bits(boxes))
        if not boxes & room.targets and away > best:
            best, found, left = away, Position(room, player, boxes), moves - made
    if not best:
        return None
    cells = list(bits(list(islice(room.walks(found.player, found.boxes), left + 1))[-1]))
    return Position(room, cells[int(random.integers(len(cells)))], found.boxes)


def takes(start: Position, moves: int) -> bool:
    """Whether no fewer than so many moves solve a game that can be solved."""
    if (_estimate(start.room, start.boxes) or 0) >= moves:
        return True
    return moves <= 1 or len(solve(start) or ()) >= moves


def _pulls(room: Room, boxes: int, reach: int) -> Iterator[tuple[int, int]]:
    """Boxes that can be pulled, and the steps they then make."""
    free = room.floor & ~boxes
    for step in room.steps:
        for box in bits(boxes & shifted(reach, -step) & shifted(free, -2 * step)):
            yield box, step


def solve(start: Position) -> list[int] | None:
    """The fewest moves that bring every box to a target, as indices into `Room.steps`; None if none do (A*, Hart et al. 1968).

    What is to go is estimated by the pushes that boxes need if nothing is in their way, which is never too much."""
    room, begin = start.room, (start.player, start.boxes)
    came: dict[_State, tuple[_State, int]] = {}
    made = {begin: 0}
    estimates: dict[int, int | None] = {}
    queue = [
        (0, 0, begin)
    ]  # moves in all, as estimated; minus moves made, for of equals the one nearest to its end is best
    while queue:
        _, minus, position = heapq.heappop(queue)
        if position[1] == room.targets:
            return _path(came, begin, position)
        count = 1 - minus
        if count > made[position] + 1:
            continue  # a shorter way there was found since
        for way, step in enumerate(room.steps):
            after = room.moved(*position, step)
            if count >= made.get(after, count + 1):
                continue
            if after[1] not in estimates:
                estimates[after[1]] = _estimate(room, after[1])
            rest = estimates[after[1]]
            if rest is not None:
                made[after], came[after] = count, (position, way)
                heapq.heappush(queue, (count + rest, -count, after))
    return None


def _estimate(room: Room, boxes: int) -> int | None:
    pushes = room.pushes
    needed = [pushes.get(box) for box in bits(boxes)]
    return None if None in needed else sum(filter(None, needed))


def _path(came: dict[_State, tuple[_State, int]], begin: _State, end: _State) -> list[int]:
    path = []
    while end != begin:
        end, way = came[end]
        path.append(way)
    return path[::-1]
