"""Every wait in the library: a name, who waits, for whom, and a deadline.

A wait that outlasts its deadline raises `StallError` with the table of all waits of the run, so a stall is one message
that says who waits for whom. The time spent in each wait is kept: the live view and the wait shares read it.
Time is the event loop's own, so a virtual clock works unchanged.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from antiphon.core.errors import StallError

T = TypeVar("T")

IDLE_TURNS = 16  # turns of the event loop without a wait that begins or ends, after which nothing else is under way


def succeed(future: asyncio.Future[T], value: T) -> None:
    """End a future with a result, unless it has ended: whoever waited for it may have been cancelled."""
    if not future.done():
        future.set_result(value)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """End a future with an error, unless it has ended. Whoever waits gets the error; if nobody does, asyncio says nothing."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # read: this is what keeps asyncio quiet


@dataclass(slots=True, kw_only=True, eq=False)
class Wait:
    """One wait in progress."""

    name: str
    owner: str
    on: str
    since: float  # seconds of the event loop's clock
    deadline: float  # seconds after `since`
    task: "asyncio.Task[Any]"
    expired: bool = False


class Deadlines:
    """The waits of one run.

    Waits of equal deadlines end in the order they began, so each deadline has one queue and one timer, whatever waits.
    """

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._open: dict[int, Wait] = {}
        self._queues: dict[float, dict[int, Wait]] = {}  # deadline -> its open waits, oldest first
        self._spent: dict[tuple[str, str], float] = defaultdict(float)
        self._changes = 0  # waits that have begun, and that have ended
        self._watchers: list[asyncio.Future[None]] = []

    async def wait(
        self, awaitable: Awaitable[T], *, name: str, owner: str, on: str, deadline: float, key: str = ""
    ) -> T:
        """Await `awaitable` for at most `deadline` seconds, which the configuration has at `key`; `StallError` afterwards."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        wait = Wait(name=name, owner=owner, on=on, since=loop.time(), deadline=deadline, task=task)
        number, cancelling = next(self._ids), task.cancelling()
        if deadline not in self._queues:
            self._queues[deadline] = {}
            loop.call_later(deadline, self._expire, deadline)
        self._open[number] = self._queues[deadline][number] = wait
        self._note_change()
        try:
            return await awaitable
        except asyncio.CancelledError:
            if wait.expired and task.uncancel() <= cancelling:
                longer = f"; {key} allows more" if key else ""
                table = self.table(loop.time())
                message = f"{owner} waited more than {deadline:g} s for {on} ({name}){longer}. Waiting now:\n{table}"
                raise StallError(message, key, owner=owner, on=on) from None
            raise
        finally:
            del self._open[number]
            self._note_change()
            self._queues.get(deadline, {}).pop(number, None)
            self._spent[owner, name] += loop.time() - wait.since

    def _expire(self, deadline: float) -> None:
        """End the waits whose deadline has come, and come again for the next."""
        loop, queue = asyncio.get_running_loop(), self._queues[deadline]
        while queue and (oldest := next(iter(queue.values()))).since + deadline <= loop.time():
            del queue[next(iter(queue))]
            oldest.expired = True
            oldest.task.cancel()
        if queue:
            loop.call_at(oldest.since + deadline, self._expire, deadline)
        else:
            del self._queues[deadline]

    async def quiesce(self, *patient: str) -> None:
        """Return once nothing happens any more: every wait in progress has one of these names, and the loop has run dry."""
        while True:
            before = self._changes
            for _ in range(IDLE_TURNS):
                await asyncio.sleep(0)
            if self._changes == before:
                if all(wait.name in patient for wait in self._open.values()):
                    return
                await self.change()

    async def change(self) -> None:
        """Return when a wait begins or ends."""
        watcher = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        await watcher

    def _note_change(self) -> None:
        self._changes += 1
        while self._watchers:
            if not (watcher := self._watchers.pop()).done():
                watcher.set_result(None)

    def open(self) -> list[Wait]:
        """The waits in progress, oldest first."""
        return list(self._open.values())

    def spent(self, owner: str, name: str) -> float:
        """Seconds that `owner` has spent in finished waits called `name`."""
        return self._spent[owner, name]

    def table(self, now: float) -> str:
        """Format the open waits as a table: owner, awaited party and seconds, one line each, longest first."""
        rows = sorted(self._open.values(), key=lambda wait: wait.since)
        return (
            "\n".join(f"  {w.owner} waits for {w.on} ({w.name}) since {now - w.since:.1f} s" for w in rows)
            or "  nobody"
        )
