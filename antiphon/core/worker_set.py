"""Equal workers that share calls: each call goes to the one with the fewest open calls, and one that dies is replaced."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from antiphon.core.deadlines import Deadlines, fail, succeed
from antiphon.core.errors import AntiphonError, StallError, WorkerDiedError
from antiphon.core.rpc import Client

C = TypeVar("C", bound=Client)

RETRY_SECONDS = (1.0, 30.0)  # pause before a worker is tried to be started again: the first, and the longest
MOST_DEATHS = 2  # of workers at one call, which is to blame then
QUICK_DEATHS = 5  # in a row, each within the longest pause after its start, that end the set


class DeadlyCallError(WorkerDiedError):
    """One call after another worker was lost at it; the set goes on without it."""


class WorkerSet(Generic[C]):
    """Keeps workers alive and divides calls among them. Use as `async with`.

    The workers serve a call `health`, which returns at once.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[int], Awaitable[C]],
        count: int,
        deadlines: Deadlines,
        report: Callable[[str], None],
        *,
        silence: float,
        patience: float,
    ) -> None:
        """Prepare to start workers.

        Args:
            name: What the workers are, in the plural, for messages.
            start: Starts the worker of a number, from 0; `WorkerDiedError` if it cannot be started now.
            count: Number of workers.
            deadlines: Bounds all waits.
            report: Receives a message about each worker that was lost, and about each that could not be started again.
            silence: Seconds without an answer after which a worker is killed.
            patience: Seconds that a worker may take to start, and that a call waits while there is none.
        """
        self._name = name
        self._start = start
        self._count = count
        self._deadlines = deadlines
        self._report = report
        self._silence = silence
        self._patience = patience
        self._open: Counter[C] = Counter()  # calls of each live worker
        self._arrived = asyncio.Event()  # there is a worker
        self._keepers: list[asyncio.Task[None]] = []
        self._broken: Exception | None = None
        self.replaces = True  # if not, the first death ends the set

    @property
    def alive(self) -> list[C]:
        """The workers that serve calls."""
        return list(self._open)

    async def __aenter__(self) -> Self:
        """Start all workers; raise the first error if one cannot be started."""
        loop = asyncio.get_running_loop()
        ready = [loop.create_future() for _ in range(self._count)]
        self._keepers = [loop.create_task(self._keep(*each), name=self._name) for each in enumerate(ready)]
        try:
            await asyncio.gather(*ready)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all workers."""
        for keeper in self._keepers:
            keeper.cancel()
        self._break(WorkerDiedError(f"the {self._name} were closed"))
        await asyncio.gather(*self._keepers, return_exceptions=True)
        alive, self._open = list(self._open), Counter()
        await asyncio.gather(*(worker.end() for worker in alive))

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker with the fewest open calls; of another one if that dies.

        Raises:
            DeadlyCallError: Two workers were lost at this call.
            StallError: There was no worker for as long as one may take to start.
            AntiphonError: The workers cannot go on.
        """
        deaths = 0
        while True:
            worker = await self._choose()
            self._open[worker] += 1
            try:
                return await worker.call(method, *args)
            except WorkerDiedError as error:
                self._lose(worker, error)
                deaths += 1
                if deaths == MOST_DEATHS and self._broken is None and self.replaces:
                    message = (
                        f"{deaths} of the {self._name} were lost at one call of {method}, the last one so: {error}"
                    )
                    raise DeadlyCallError(message) from error
            finally:
                if worker in self._open:
                    self._open[worker] -= 1

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of each worker that is alive, at least one; `WorkerDiedError` if one dies meanwhile."""
        await self._choose()
        return await asyncio.gather(*(worker.call(method, *args) for worker in self._open))

    async def _choose(self) -> C:
        if self._broken is not None:
            raise self._broken
        while not self._open:
            self._arrived.clear()
            on, patience = f"one of the {self._name}", self._patience + RETRY_SECONDS[1]
            await self._deadlines.wait(self._arrived.wait(), name="worker", owner="run", on=on, deadline=patience)
            if self._broken is not None:
                raise self._broken
        return min(self._open, key=self._open.__getitem__)

    async def _keep(self, number: int, ready: "asyncio.Future[None]") -> None:
        """Keep the worker of a number alive.

        Consumes its deaths, waits for it, is unblocked by its end or its silence, produces a worker in its place. The first
        start must succeed, else `ready` gets its error. A later error that is not about a process ends the set; so do deaths,
        one soon after the other, that leave no worker.
        """
        pause, deaths, loop = RETRY_SECONDS[0], 0, asyncio.get_running_loop()
        while True:
            try:
                worker = await self._wait(self._start(number), "start", self._patience)
            except (WorkerDiedError, StallError) as error:
                if not ready.done():
                    fail(ready, error)
                    return
                self._report(f"none of the {self._name} takes the place of one that was lost yet: {error}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
                continue
            except Exception as error:  # noqa: BLE001 - named boundary: those who wait for the workers raise it
                fail(ready, error)
                self._break(error)
                return
            began = loop.time()
            self._open[worker] = 0
            self._arrived.set()
            succeed(ready, None)
            death = await self._end_of(worker)
            self._lose(worker, death)
            if loop.time() - began >= RETRY_SECONDS[1]:
                pause, deaths = RETRY_SECONDS[0], 0
            deaths += 1
            if not self.replaces or (deaths >= QUICK_DEATHS and not self._open):
                self._break(death)
                return
            if deaths > 1:
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])

    def _break(self, error: Exception) -> None:
        """Have all later calls fail with an error, the first of several."""
        self._broken = self._broken or error
        self._arrived.set()

    async def _end_of(self, worker: C) -> AntiphonError:
        """Return the error that a worker died of, or that it is silent."""
        while True:
            try:
                async with asyncio.timeout(self._silence / 4):
                    await worker.died()
            except TimeoutError:
                pass
            except AntiphonError as error:
                return error
            try:
                await self._wait(worker.call("health"), "health", self._silence)
            except StallError:
                return WorkerDiedError(f"one of the {self._name} did not answer for {self._silence:g} s and was killed")
            except AntiphonError as error:
                return error

    def _lose(self, worker: C, error: AntiphonError) -> None:
        if worker in self._open:
            del self._open[worker]
            worker.kill()
            self._report(f"{error}; {self._name} left: {len(self._open)}")

    async def _wait(self, awaitable: Awaitable[Any], name: str, deadline: float) -> Any:
        on = f"one of the {self._name}"
        return await self._deadlines.wait(awaitable, name=name, owner="run", on=on, deadline=deadline)
