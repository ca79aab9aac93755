"""The requests of one engine: which wait, which run, and what new weights do to those that run.

```
request    QUEUED ──admit──▶ RUNNING ──finish──▶ (gone)
              └──────abort──────┴──────────────▶ (gone, with a last delta)
admission  open, unless it is on hold for some reason or an update drains
update     IDLE ──begin_update: drain, while requests run──▶ DRAINING ──the last of them ends──▶ take_drained ──▶ IDLE
             └────begin_update: any other mode, or nothing runs: it is to be applied at once
```

An engine applies an update between two steps, and then asks `continue_running` how each running request goes on.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

from antiphon.core.errors import RequestError
from antiphon.core.types import FinishReason, GenerateRequest, OnUpdate, WeightsUpdate
from antiphon.engines.deltas import Delta

T = TypeVar("T")


class Progress(NamedTuple):
    """Progress of a running request."""

    sampled: bool  # it has tokens beyond its prompt
    cached: bool  # the KV cache holds some of its tokens
    resumable: bool = True  # `RECOMPUTE` can go on from the tokens it has; else these are dropped


class Continuation(Enum):
    """Ways to continue a running request with new weights."""

    KEEP_CACHE = auto()
    """With the cache that older weights computed; its later tokens are flagged as mixed."""
    RECOMPUTE = auto()
    """From the same tokens, with a cache that the new weights compute."""
    RESTART = auto()
    """From its prompt; the tokens sampled so far are dropped."""


def choose_continuation(mode: OnUpdate, progress: Progress) -> Continuation:
    """Return how a request continues. With `KEEP`, one that has no cache yet is computed by the new weights alone."""
    if mode is OnUpdate.KEEP and progress.cached:
        return Continuation.KEEP_CACHE
    if progress.sampled and (mode is OnUpdate.RESTART or not progress.resumable):
        return Continuation.RESTART
    return Continuation.RECOMPUTE


class RequestQueue(Generic[T]):
    """Queued and running requests of an engine. `T` is what the engine keeps of a running request."""

    def __init__(
        self,
        capacity: int,
        *,
        start: Callable[[GenerateRequest], T],
        stop: Callable[[T], None],
        emit: Callable[[Delta], None],
    ) -> None:
        """Create an empty queue.

        Args:
            capacity: Most requests that run at once.
            start: Begins to run a request, and returns what the engine keeps of it.
            stop: Ends a running request early.
            emit: Receives deltas of requests that are aborted or restarted.
        """
        self.capacity = capacity
        self._start = start
        self._stop = stop
        self._emit = emit
        self._heap: list[tuple[int, int, str]] = []  # (priority, arrival, id); entries of aborted requests stay
        self._queued: dict[str, tuple[int, GenerateRequest]] = {}  # id -> (arrival, request)
        self._arrivals = itertools.count()
        self._running: dict[str, T] = {}
        self._holds: set[str] = set()
        self._draining: WeightsUpdate | None = None

    def __contains__(self, request: str) -> bool:
        """Return True if a request with this id is queued or runs."""
        return request in self._queued or request in self._running

    @property
    def running(self) -> Mapping[str, T]:
        """The engine's state of each running request, by id."""
        return self._running

    @property
    def busy(self) -> bool:
        """True while a step has something to do: running or queued requests and no hold, or an update that drains."""
        return self._draining is not None or (not self._holds and bool(self._running or self._queued))

    # --- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; raise `RequestError` if its id is in use."""
        if request.id in self:
            raise RequestError(f"request {request.id!r} is already running")
        arrival = next(self._arrivals)
        heapq.heappush(self._heap, (request.priority, arrival, request.id))
        self._queued[request.id] = arrival, request

    def admit(self) -> None:
        """Start queued requests while there is room, the most urgent first and then the oldest."""
        while self._heap and len(self._running) < self.capacity and not self._holds and self._draining is None:
            _, arrival, name = heapq.heappop(self._heap)
            queued_arrival, request = self._queued.get(name, (None, None))
            if request is not None and queued_arrival == arrival:  # else it was aborted, and its id perhaps used again
                del self._queued[name]
                self._running[name] = self._start(request)

    def finish(self, request: str) -> None:
        """Forget a running request that came to its end."""
        del self._running[request]

    def abort(self, request: str) -> bool:
        """End a request and emit its last delta; return False for an unknown id."""
        if self._queued.pop(request, None) is None:
            if request not in self._running:
                return False
            self._stop(self._running.pop(request))
        self._emit(Delta.empty(request, finish=FinishReason.ABORT))
        return True

    def clear(self) -> None:
        """Forget all requests, without a delta for any."""
        self._heap.clear()
        self._queued.clear()
        self._running.clear()

    def hold(self, reason: str) -> None:
        """Admit no requests until `release` is called with the same reason; there may be several reasons at once."""
        self._holds.add(reason)

    def release(self, reason: str) -> None:
        """End a hold, if there is one for this reason."""
        self._holds.discard(reason)

    # --- updates -------------------------------------------------------------------------------------------------------

    def begin_update(self, update: WeightsUpdate, mode: OnUpdate) -> bool:
        """Return True if new weights are to be applied now.

        With `DRAIN` they wait while requests run, and no others are admitted meanwhile: `take_drained` returns them. An
        update replaces one that waits.
        """
        deferred = mode is OnUpdate.DRAIN and bool(self._running)
        self._draining = update if deferred else None
        return not deferred

    def take_drained(self) -> WeightsUpdate | None:
        """Return the update that waited, once no request runs; None if there is none or it still waits."""
        if self._running:
            return None
        update, self._draining = self._draining, None
        return update

    def continue_running(self, mode: OnUpdate, progress: Callable[[T], Progress]) -> Iterator[tuple[T, Continuation]]:
        """Yield each running request and how it continues with new weights; emit a delta for each that restarts."""
        for name, item in list(self._running.items()):
            continuation = choose_continuation(mode, progress(item))
            if continuation is Continuation.RESTART:
                self._emit(Delta.empty(name, restarted=True))
            yield item, continuation
