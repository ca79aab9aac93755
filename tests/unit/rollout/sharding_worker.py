"""A rollout worker that answers at once, or never."""

import asyncio

from antiphon.core.rpc import STARTED, AsyncWorker, Reply
from antiphon.core.workers import Worker
from antiphon.rollout.remote_workers import Counts


class Asks(AsyncWorker):
    """Asks the judge about every attempt."""

    def _state(self) -> Counts:
        return Counts(engines=1)

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as owner:
            await self._serve(owner, {"run": self._run_attempt})

    async def _run_attempt(self, prompt, attempt, started):
        return await self._ask("judge", attempt)


class Answers(Worker):
    """Says who played which attempt, and how many were cancelled. A prompt called `stay` waits for that, `stay on 0` with
    the first worker alone; `die` ends a worker, and `hang` silences it."""

    def __init__(self, serial: int, engines: int) -> None:
        self.serial = serial
        self.engines = engines
        self.silent = False
        self.staying: set[int] = set()
        self.cancelled = 0

    def start(self) -> None:
        self._say(STARTED, None)

    def begin_call(self, key, method, args) -> None:
        prompt = args[0].id if method == "run" else method
        if prompt == "die":
            raise ValueError("this was too much")
        self.silent |= prompt == "hang"
        if prompt in ("stay", f"stay on {self.serial}"):
            self.staying.add(key)
        elif not self.silent:
            self._say(key, (self.serial, *args[1:2], self.cancelled))

    def cancel_call(self, key) -> None:
        self.staying.remove(key)
        self.cancelled += 1

    def _say(self, key, value) -> None:
        self.emit(Reply("result", key, value, Counts(engines=self.engines)))
