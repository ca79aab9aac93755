"""Draw rooms of Sokoban that can be solved.

The method is that of Racanière et al. 2017, "Imagination-Augmented Agents" (appendix), as in gym-sokoban: carve a room by a
random walk, put boxes on targets, and play backwards by pulling.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from antiphon_envs.sokoban.room import Position, Room, cells_of, shift

STEPS_PER_SIDE = 1.7  # of the random walk, for each cell of height and width, as in gym-sokoban
TURN_RATE = 0.35  # probability that the walk changes its direction, as in gym-sokoban
WIDENING = 2  # cells, not always different, that are carved beside each cell of the walk


def draw_room(
    random: np.random.Generator, height: int, width: int, boxes: int, pulls: int, moves: int
) -> Position | None:
    """Draw a position with no box on a target that at most `moves` solve; None if this draw failed.

    Of up to `pulls` random pulls it is the position with the boxes furthest from targets in all.
    """
    floor = list(cells_of(_carve_floor(random, height, width)))
    if len(floor) <= 2 * boxes:
        return None
    *targets, at = (floor[each] for each in random.choice(len(floor), boxes + 1, replace=False))
    room = Room(height, width, sum(floor), sum(targets))
    return _play_backwards(random, room, at, pulls, moves)


def _carve_floor(random: np.random.Generator, height: int, width: int) -> int:
    """Carve connected floor: the cells of a random walk, each with some beside it."""
    count = int(STEPS_PER_SIDE * (height + width))
    turns, ways = random.random(count) < TURN_RATE, random.integers(4, size=(count, 1 + WIDENING)).tolist()
    row, column, way = int(random.integers(1, height - 1)), int(random.integers(1, width - 1)), 0
    floor = 0

    def neighbor(way: int) -> tuple[int, int]:
        down, right = ((-1, 0), (1, 0), (0, -1), (0, 1))[way]
        return min(max(row + down, 1), height - 2), min(max(column + right, 1), width - 2)

    for turn, (new, *asides) in zip(turns, ways, strict=True):
        way = new if turn else way
        for down, right in ((row, column), *map(neighbor, asides)):
            floor |= 1 << down * width + right
        row, column = neighbor(way)
    return floor


def _play_backwards(random: np.random.Generator, room: Room, player: int, pulls: int, moves: int) -> Position | None:
    """Pull boxes away from their targets at random."""
    boxes, made, best, found = room.targets, 0, 0, Position(room, 0, 0)
    left = 0  # moves that are left for the player to walk elsewhere before the game begins
    for chance in random.random(pulls).tolist():
        layers = list(room.reachable(player, boxes))
        possible = list(_possible_pulls(room, boxes, layers[-1]))
        if not possible:
            break
        box, step = possible[int(chance * len(possible))]
        beside, beyond = shift(box, step), shift(box, 2 * step)
        made += 1 + next(count for count, layer in enumerate(layers) if layer & beside)
        if made > moves:
            break
        player, boxes = beyond, boxes ^ box ^ beside
        distance = sum(room.push_distances[each] for each in cells_of(boxes))
        if not boxes & room.targets and distance > best:
            best, found, left = distance, Position(room, player, boxes), moves - made
    if not best:
        return None
    cells = list(cells_of(list(islice(room.reachable(found.player, found.boxes), left + 1))[-1]))
    return Position(room, cells[int(random.integers(len(cells)))], found.boxes)


def _possible_pulls(room: Room, boxes: int, reach: int) -> Iterator[tuple[int, int]]:
    """Yield the boxes that a player who reaches the cells `reach` can pull, and the steps that they then make."""
    free = room.floor & ~boxes
    for step in room.steps:
        for box in cells_of(boxes & shift(reach, -step) & shift(free, -2 * step)):
            yield box, step
