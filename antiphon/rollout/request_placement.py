"""Assigns requests to engines: the queue of requests that wait for one, and the rules that place them.

The most urgent request goes first, then the oldest, to an engine that holds the version it asks for: to the one that has
the longest prefix of it if there is room, else to the least loaded. What no engine may take now keeps its place.
"""

import asyncio
import heapq
import itertools
import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from antiphon.core.deadlines import fail
from antiphon.core.errors import WorkerDiedError
from antiphon.core.types import GenerateRequest
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.engine_state import EngineState, LeastLoaded

MAX_PREFIXES = 65_536  # conversations and groups whose engine is remembered


@dataclass(order=True, slots=True)
class PendingRequest:
    """A request that no engine has yet; ordered by urgency, then by age."""

    priority: int
    number: int
    request: GenerateRequest = field(compare=False)
    placed: asyncio.Future[EngineState] = field(compare=False)


class RequestPlacement:
    """Places requests on the engines in `members`."""

    def __init__(self, config: RolloutConfig, events: Events, preferred_devices: Mapping[str, str]) -> None:
        """Create a placement without engines.

        Args:
            config: Its `placement`, `deterministic` and size of a group.
            events: Record each placement, sleep, wake and load.
            preferred_devices: Class of devices by task; a task's requests go there while there is room.
        """
        self.on_idle_change: Callable[[EngineState], None] = lambda member: None
        """Called when an engine may have become idle or busy."""
        self.members: list[EngineState] = []
        self.outstanding = 0  # requests that wait or run
        self._deterministic = config.deterministic
        self._pinned = config.placement == "pinned"
        self._group_slots = config.group_size + config.redundancy  # held by each pinned group
        self._events = events
        self._preferred_devices = dict(preferred_devices)
        self._sleeping = 0  # engines
        # Least version -> a heap. Requests for a version that no engine has yet cost nothing to skip.
        self._pending: dict[int, list[PendingRequest]] = {}
        self._free: dict[str, LeastLoaded] = defaultdict(LeastLoaded)  # by class of device
        self._prefix_engines: OrderedDict[str, EngineState] = (
            OrderedDict()
        )  # affinity key -> engine that served it last

    # --- engines -------------------------------------------------------------------------------------------------------

    def limit(self, capacity: int, ahead: float) -> float:
        """Return how many requests may be sent to an engine of `capacity` slots.

        A pinned group needs room for all of its requests when its first is placed. Otherwise `ahead` times the slots are
        filled, so that the next request is there when a slot becomes free.
        """
        return max(1, capacity - self._group_slots + 1) if self._pinned else capacity * ahead

    def add(self, member: EngineState, *, asleep: bool) -> None:
        """Add an engine and give it requests."""
        self.set_asleep(member, asleep=asleep)
        self._free[member.engine.device].update(member)
        self.dispatch()

    def remove(self, member: EngineState) -> None:
        """Remove an engine."""
        self.members.remove(member)
        self.set_asleep(member, asleep=False)

    def set_asleep(self, member: EngineState, *, asleep: bool) -> None:
        """Note that an engine leaves its device, or takes it again."""
        if member.asleep != asleep:
            member.asleep, member.since = asleep, asyncio.get_running_loop().time()
            self._sleeping += 1 if asleep else -1
            self.on_idle_change(member)
            self._events.add("sleep" if asleep else "wake", engine=member.number)

    def update(self, member: EngineState) -> None:
        """Note that an engine may hold new weights or have room."""
        if member.version != member.engine.version:
            member.version, member.since = member.engine.version, asyncio.get_running_loop().time()
            self._events.add("load", engine=member.number, version=member.version)
        self.on_idle_change(member)
        self._free[member.engine.device].update(member)

    # --- requests ------------------------------------------------------------------------------------------------------

    def enqueue(self, request: GenerateRequest, number: int) -> asyncio.Future[EngineState]:
        """Queue a request; the future resolves to its engine, perhaps at once. `number` orders requests by age."""
        placed: asyncio.Future[EngineState] = asyncio.get_running_loop().create_future()
        queue = self._pending.setdefault(request.min_version, [])
        heapq.heappush(queue, PendingRequest(request.priority, number, request, placed))
        self.dispatch()
        return placed

    def dispatch(self) -> None:
        """Place all requests that can be placed now. Deterministic runs place them in waves instead: see `place_wave`."""
        while not self._deterministic and (found := self._next()):
            pending, member = found
            queue = self._pending[pending.request.min_version]
            heapq.heappop(queue)
            if not queue:
                del self._pending[pending.request.min_version]
            self._place(pending, member)

    def place_wave(self) -> None:
        """Place all pending requests at once, whatever the room, in an order that does not depend on time."""
        members = [member for member in self.members if member.awake]
        if not (members and self._pending):
            return
        for member in members:
            member.engine.pause()
        wave = sorted(itertools.chain.from_iterable(self._pending.values()), key=_wave_order)
        self._pending.clear()
        for number, pending in enumerate(pending for pending in wave if not pending.placed.done()):
            self._place(pending, members[number % len(members)])
        # After the waiting tasks were woken, in this order, and have started their requests.
        loop = asyncio.get_running_loop()
        for member in members:
            loop.call_soon(member.engine.resume)

    def release(self, member: EngineState, request: GenerateRequest) -> None:
        """Note that a request has left its engine. A pinned group holds its slots until its last request has left."""
        if not self._pinned:
            member.running -= 1
        else:
            group = _group_of(request)
            member.groups[group] -= 1
            if not member.groups[group]:
                del member.groups[group]
                member.running -= self._group_slots
        self.update(member)
        if not member.running:
            member.idle.set()

    def could_have_placed(self, request: GenerateRequest, seconds: float) -> bool:
        """Return True if some engine was able to take the request for the last `seconds`.

        An engine that slept or loaded meanwhile was not.
        """
        before = asyncio.get_running_loop().time() - seconds
        return any(
            member.awake and member.version >= request.min_version and member.since <= before for member in self.members
        )

    def fail_pending(self, error: WorkerDiedError) -> None:
        """Fail all requests that wait for an engine."""
        for pending in itertools.chain.from_iterable(self._pending.values()):
            fail(pending.placed, error)

    # --- inside --------------------------------------------------------------------------------------------------------

    @property
    def _fair_share(self) -> float:
        """Requests that each engine would run if all had the same; no engine is given more.

        Else the first engine with new weights would take the requests meant for all, and siblings would crowd where their
        prefix is. Pinned groups are meant to.
        """
        if self._pinned:
            return math.inf
        return math.ceil(self.outstanding / max(len(self.members) - self._sleeping, 1))

    def _place(self, pending: PendingRequest, member: EngineState) -> None:
        request = pending.request
        if not self._pinned:
            member.running += 1
        else:
            group = _group_of(request)
            member.running += 0 if member.groups[group] else self._group_slots
            member.groups[group] += 1
        self.on_idle_change(member)
        self._free[member.engine.device].update(member)
        self._remember_prefixes(request, member)
        self._events.add("place", request=request.id, engine=member.number, prompt=len(request.tokens))
        pending.placed.set_result(member)

    def _next(self) -> tuple[PendingRequest, EngineState] | None:
        """Return the most urgent request that can be placed, and its engine."""
        possible = []
        for version, queue in list(self._pending.items()):
            while queue and queue[0].placed.done():  # cancelled while it waited
                heapq.heappop(queue)
            if not queue:
                del self._pending[version]
            elif (member := self._choose_engine(queue[0].request)) is not None:
                possible.append((queue[0], member))
        return min(possible, key=lambda found: found[0], default=None)

    def _choose_engine(self, request: GenerateRequest) -> EngineState | None:
        """Return the engine with the longest prefix, else the least loaded of the preferred devices, else of all."""
        for key in request.affinity:
            holder = self._prefix_engines.get(key)
            if holder is None:
                continue
            if self._pinned and holder.awake and holder.version >= request.min_version:
                return holder
            if holder.accepts(request.min_version) and holder.running < self._fair_share:
                return holder
        device = self._preferred_devices.get(request.task)
        if device in self._free and (member := self._free[device].find(request.min_version, math.inf)):
            return member
        share = self._fair_share
        found = [member for free in self._free.values() if (member := free.find(request.min_version, share))]
        return min(found, key=lambda member: (member.running, member.number), default=None)

    def _remember_prefixes(self, request: GenerateRequest, member: EngineState) -> None:
        for key in request.affinity:
            self._prefix_engines[key] = member
            self._prefix_engines.move_to_end(key)
            if len(self._prefix_engines) > MAX_PREFIXES:
                self._prefix_engines.popitem(last=False)


def _group_of(request: GenerateRequest) -> str:
    return (request.affinity or (request.id,))[-1]


def _wave_order(pending: PendingRequest) -> tuple[int, list[int]]:
    """Order by priority, then by the numbers of group, sibling, attempt and turn in the id."""
    return pending.priority, [int(number) for number in re.split(r"[./]", pending.request.id)]
