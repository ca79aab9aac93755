"""The engine pool: one queue of requests that engines pull from as they have room, and the loading of new weights.

Requests wait here and not in an engine, so that a slow engine delays only what it already runs. A request goes only to
an engine that holds at least the version it asks for.
"""

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from antiphon.engines.base import GenerationHandle, InferenceEngine
from antiphon.types import Completion, GenerateRequest, OnUpdate, WeightsUpdate
from antiphon.waits import Waits

T = TypeVar("T")

AHEAD = 1.25  # requests sent to an engine, relative to its slots: those that queue there hide the way here and back
REMEMBERED = 4096  # affinities


@dataclass(order=True, slots=True)
class _Pending:
    priority: int
    number: int
    request: GenerateRequest = field(compare=False)
    placed: asyncio.Future["_Member"] = field(compare=False)


@dataclass(slots=True, eq=False)
class _Member:
    engine: InferenceEngine
    running: int = 0

    @property
    def has_room(self) -> bool:
        return self.running < self.engine.capacity * AHEAD


class EnginePool:
    """Places requests on engines, the least loaded first, and siblings where their prefix already is."""

    def __init__(self, engines: Sequence[InferenceEngine], waits: Waits, timeout: float) -> None:
        self.generated_tokens = 0
        self._members = [_Member(engine) for engine in engines]
        self._waits = waits
        self._timeout = timeout
        self._pending: dict[
            int, list[_Pending]
        ] = {}  # least version -> a heap; few at a time, so most are never looked at
        self._numbers = itertools.count()
        self._homes: OrderedDict[str, _Member] = OrderedDict()  # affinity -> where it was served last

    async def generate(self, request: GenerateRequest) -> Completion:
        """Run one request to its end. Cancelling this aborts the request wherever it is."""
        placed: asyncio.Future[_Member] = asyncio.get_running_loop().create_future()
        queue = self._pending.setdefault(request.min_version, [])
        heapq.heappush(queue, _Pending(request.priority, next(self._numbers), request, placed))
        self._dispatch()
        handle: GenerationHandle | None = None
        try:
            member = await self._wait(placed, "queue", "a free engine slot")
            handle = member.engine.start(request)
            completion = await self._wait(handle.result(), "generation", "an engine")
        except BaseException:
            if handle is not None:
                handle.abort()
            raise
        finally:
            if placed.done() and not placed.cancelled():
                placed.result().running -= 1
            self._dispatch()
        self.generated_tokens += len(completion.tokens)
        return completion

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Give every engine new weights; returns when all sample from them. Each serves requests as soon as it has them."""

        async def load_one(member: _Member) -> None:
            await member.engine.load(update, mode)
            self._dispatch()

        await self._wait(asyncio.gather(*map(load_one, self._members)), "load", "engines to load weights")

    async def _wait(self, awaitable: Awaitable[T], name: str, on: str) -> T:
        return await self._waits.wait(awaitable, name=name, owner="pool", on=on, deadline=self._timeout)

    def _dispatch(self) -> None:
        """Place what can be placed, most urgent first; what no engine may take now keeps its turn."""
        while free := [member for member in self._members if member.has_room]:
            newest = max(member.engine.version for member in free)
            waiting = {version: queue for version, queue in self._pending.items() if version <= newest}
            if not waiting:
                return
            version, queue = min(waiting.items(), key=lambda item: item[1][0])
            pending = heapq.heappop(queue)
            if not queue:
                del self._pending[version]
            if not pending.placed.done():  # else cancelled while it waited
                member = self._choose(pending.request, [m for m in free if m.engine.version >= version])
                member.running += 1
                pending.placed.set_result(member)

    def _choose(self, request: GenerateRequest, eligible: list[_Member]) -> _Member:
        home = self._homes.get(request.affinity)
        member = home if home in eligible else min(eligible, key=lambda m: m.running)
        if request.affinity:
            self._homes[request.affinity] = member
            self._homes.move_to_end(request.affinity)
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        return member
