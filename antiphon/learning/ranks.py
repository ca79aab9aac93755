"""The workers that are one learner together, as one worker."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from antiphon.errors import AntiphonError
from antiphon.workers import WorkerHandle


class Ranks:
    """A `WorkerHandle` of several. What it is called, all do at once; the answer is that of the first. What one says is heard
    when all have said it, or said something else; the death of one is that of all."""

    def __init__(self, members: Sequence[WorkerHandle]) -> None:
        self.name = members[0].name
        self._members = members

    async def meet(self, host: str) -> None:
        """Have them find each other, the first listening on an address of its machine."""
        where = await self._members[0].call("host", host)
        await asyncio.gather(*(member.call("join", rank, where) for rank, member in enumerate(self._members)))

    async def call(self, method: str, *args: Any) -> Any:
        """See `WorkerHandle.call`."""
        return (await asyncio.gather(*(member.call(method, *args) for member in self._members)))[0]

    def send(self, method: str, *args: Any) -> None:
        """See `WorkerHandle.send`."""
        for member in self._members:
            member.send(method, *args)

    def on_event(self, callback: Callable[[Any], None]) -> None:
        """See `WorkerHandle.on_event`: once all have spoken, the first of what they said that is not empty."""
        said: list[deque[Any]] = [deque() for _ in self._members]

        def hear(own: deque[Any], event: Any) -> None:
            own.append(event)
            if all(said):
                events = [of_one.popleft() for of_one in said]
                callback(next(filter(None, events), events[0]))

        for member, own in zip(self._members, said, strict=True):
            member.on_event(partial(hear, own))

    def on_death(self, callback: Callable[[AntiphonError], None]) -> None:
        """See `WorkerHandle.on_death`."""
        told = False

        def tell(error: AntiphonError) -> None:
            nonlocal told
            if not told:
                told = True
                callback(error)

        for member in self._members:
            member.on_death(tell)

    async def died(self) -> None:
        """See `WorkerHandle.died`."""
        await asyncio.gather(*(member.died() for member in self._members))

    async def close(self) -> None:
        """See `WorkerHandle.close`."""
        await asyncio.gather(*(member.close() for member in self._members))

    def kill(self) -> None:
        """See `WorkerHandle.kill`."""
        for member in self._members:
            member.kill()
