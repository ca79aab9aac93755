"""What the pool keeps of its engines, and of the requests that wait for one: who has room, the least loaded first."""

import asyncio
import heapq
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from antiphon.core.types import GenerateRequest
from antiphon.engines.base import GenerationHandle, InferenceEngine


@dataclass(order=True, slots=True)
class Pending:
    """A request that no engine has yet: the most urgent first, then the oldest."""

    priority: int
    number: int
    request: GenerateRequest = field(compare=False)
    placed: asyncio.Future["EngineState"] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a pool has more engines while more is asked of it, and lets them go afterwards."""

    most: int  # engines
    idle_seconds: float  # after which one that is not needed may go
    close: Callable[[InferenceEngine], Awaitable[None]]


@dataclass(slots=True, eq=False)
class EngineState:
    """An engine of the pool."""

    number: int
    engine: InferenceEngine
    limit: float  # requests that may be sent to it
    version: int  # of its weights, as of when the pool last looked
    since: float  # on the loop's clock, when it joined, woke up, or was last seen with new weights
    running: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set when nothing runs there
    open: bool = True  # takes requests; False once it is dead or retiring
    asleep: bool = False  # has left its device to what trains
    handles: set[GenerationHandle] = field(default_factory=set)  # of the requests that run there
    noted: set[tuple[int, int]] = field(default_factory=set)  # (version, running) of its entries in `LeastLoaded`
    timer: asyncio.TimerHandle | None = None  # while nothing runs there, in a pool that lets engines go
    spare: bool = False  # for so long that it may go
    groups: Counter[str] = field(default_factory=Counter)  # pinned: requests of each group there

    @property
    def awake(self) -> bool:
        """Whether it takes requests at all."""
        return self.open and not self.asleep

    def takes(self, version: int) -> bool:
        """Whether a request for this version may go there now."""
        return self.awake and self.running < self.limit and self.version >= version


class LeastLoaded:
    """Engines with room, the least loaded first, by the version they hold.

    A heap a version of (requests running, number, member). An entry that is not true any more stays until it comes to the
    top, where it is dropped; each change of a member adds a true one, if there is none.
    """

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[int, int, EngineState]]] = {}

    def note(self, member: EngineState) -> None:
        """A member has changed."""
        version, running = member.version, member.running
        if member.takes(version) and (version, running) not in member.noted:
            member.noted.add((version, running))
            heapq.heappush(self._heaps.setdefault(version, []), (running, member.number, member))

    def best(self, version: int, share: float) -> EngineState | None:
        """The least loaded engine with room that holds at least `version` and runs fewer than `share` requests."""
        tops = [top for held in list(self._heaps) if held >= version and (top := self._top(held, share))]
        return min(tops)[2] if tops else None

    def _top(self, version: int, share: float) -> tuple[int, int, EngineState] | None:
        heap = self._heaps[version]
        while heap:
            running, _, member = heap[0]
            if member.running == running and member.version == version and member.takes(version):
                return heap[0] if running < share else None
            heapq.heappop(heap)
            member.noted.discard((version, running))
        del self._heaps[version]
        return None
