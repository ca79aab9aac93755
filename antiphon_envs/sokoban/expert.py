"""The expert of Sokoban: A* search (Hart et al. 1968) for the fewest moves."""

import heapq

from antiphon_envs.sokoban.room import Position, Room, cells_of

_State = tuple[int, int]  # the player (one bit), and boxes


def needs_moves(position: Position, moves: int) -> bool:
    """Return True if no fewer than `moves` solve a position that can be solved."""
    if (_remaining_pushes(position.room, position.boxes) or 0) >= moves:
        return True
    return moves <= 1 or len(solve(position) or ()) >= moves


def solve(position: Position) -> list[int] | None:
    """Return the fewest moves that bring every box to a target, as indices into `Room.steps`; None if there are none.

    The estimate of what remains is the pushes of each box if nothing is in its way, which is never too high.
    """
    room, begin = position.room, (position.player, position.boxes)
    parents: dict[_State, tuple[_State, int]] = {}
    made = {begin: 0}
    estimates: dict[int, int | None] = {}
    # Entries are estimated moves in all; minus the moves made, so that of equals the one nearest to its end comes first; state.
    queue = [(0, 0, begin)]
    while queue:
        _, minus, state = heapq.heappop(queue)
        if state[1] == room.targets:
            return _path(parents, begin, state)
        count = 1 - minus
        if count > made[state] + 1:
            continue  # a shorter way there was found since
        for way, step in enumerate(room.steps):
            after = room.move(*state, step)
            if count >= made.get(after, count + 1):
                continue
            if after[1] not in estimates:
                estimates[after[1]] = _remaining_pushes(room, after[1])
            rest = estimates[after[1]]
            if rest is not None:
                made[after], parents[after] = count, (state, way)
                heapq.heappush(queue, (count + rest, -count, after))
    return None


def _remaining_pushes(room: Room, boxes: int) -> int | None:
    """Return a lower bound of the pushes to the end; None if a box can reach no target."""
    distances = room.push_distances
    needed = [distances.get(box) for box in cells_of(boxes)]
    return None if None in needed else sum(filter(None, needed))


def _path(parents: dict[_State, tuple[_State, int]], begin: _State, end: _State) -> list[int]:
    path = []
    while end != begin:
        end, way = parents[end]
        path.append(way)
    return path[::-1]
