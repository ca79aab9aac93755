"""The pool's view of its engines, and an index of those with room, the least loaded first."""

import asyncio
import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from antiphon.engines.base import GenerationHandle, InferenceEngine


@dataclass(slots=True, eq=False)
class EngineState:
    """An engine of the pool."""

    number: int
    engine: InferenceEngine
    limit: float  # requests that may be sent to it
    version: int  # of its weights, as of the last update of this record
    since: float  # loop time at which it joined, fell asleep, woke up or was last seen with new weights
    running: int = 0  # requests
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set when nothing runs there
    open: bool = True  # accepts requests; False once it is dead or retiring
    asleep: bool = False  # has left its device to the learner
    loads: int = 0  # loads of weights in progress
    handles: set[GenerationHandle] = field(default_factory=set)  # of the requests that run there
    indexed: set[tuple[int, int]] = field(default_factory=set)  # (version, running) of its entries in `LeastLoaded`
    idle_timer: asyncio.TimerHandle | None = None  # runs while the engine is idle, in a pool that scales
    removable: bool = False  # idle for so long that the pool may close it
    groups: Counter[str] = field(default_factory=Counter)  # with pinned placement: requests of each group there

    @property
    def awake(self) -> bool:
        """True if it accepts requests at all."""
        return self.open and not self.asleep

    def describe_load(self) -> "EngineLoad":
        """Return what it does now."""
        state = "asleep" if self.asleep else "leaving" if not self.open else "loading" if self.loads else "ready"
        name = f"engine {self.number}"
        return EngineLoad(name, len(self.handles), self.engine.capacity, self.engine.version, state)

    def accepts(self, version: int) -> bool:
        """Return True if a request that needs at least this version may go there now."""
        return self.awake and self.running < self.limit and self.version >= version


class EngineLoad(NamedTuple):
    """Load and version of an engine, or of all engines of a rollout worker, at a moment.

    `capacity` is 0 if it is not known; `state` is ready, loading, asleep or leaving.
    """

    name: str
    running: int  # requests
    capacity: int  # requests decoded at once
    version: int
    state: str


class PoolLoad(NamedTuple):
    """The engines of a run at a moment."""

    engines: list[EngineLoad]
    waiting: int  # requests that no engine has yet


class LeastLoaded:
    """An index of the engines with room, ordered by load, for each version they hold.

    There is one heap of (running requests, number, engine) for each version. An outdated entry stays until it reaches the
    top of its heap and is dropped there; `update` adds a current entry if there is none.
    """

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[int, int, EngineState]]] = {}

    def update(self, member: EngineState) -> None:
        """Index an engine that has changed."""
        version, running = member.version, member.running
        if member.accepts(version) and (version, running) not in member.indexed:
            member.indexed.add((version, running))
            heapq.heappush(self._heaps.setdefault(version, []), (running, member.number, member))

    def find(self, version: int, share: float) -> EngineState | None:
        """Return the least loaded engine that has room, holds at least `version` and runs fewer than `share` requests."""
        tops = [top for held in list(self._heaps) if held >= version and (top := self._top(held, share))]
        return min(tops)[2] if tops else None

    def _top(self, version: int, share: float) -> tuple[int, int, EngineState] | None:
        heap = self._heaps[version]
        while heap:
            running, _, member = heap[0]
            if member.running == running and member.version == version and member.accepts(version):
                return heap[0] if running < share else None
            heapq.heappop(heap)
            member.indexed.discard((version, running))
        del self._heaps[version]
        return None
