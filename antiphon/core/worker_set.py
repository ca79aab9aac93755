"""Equal workers that share calls: each call goes to the one with the fewest open calls, and one that dies is replaced."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from antiphon.core.deadlines import Deadlines, fail, succeed
from antiphon.core.errors import AntiphonError, StallError, WorkerDiedError
from antiphon.core.rpc import AnswererDiedError, Client

C = TypeVar("C", bound=Client)
T = TypeVar("T")

RETRY_SECONDS = (1.0, 30.0)  # pause before another try to start a worker: the first, and the longest
MOST_DEATHS = 2  # workers lost at one call before the call is blamed
QUICK_DEATHS = 5  # in a row, each within the longest pause after its start, that end the set


class DeadlyCallError(WorkerDiedError):
    """One call after another worker was lost at it; the set goes on without it."""


def _ignore(worker: Client, lost: Client) -> None:
    """Do nothing about a worker that took the place of a lost one."""


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
        patience_key: str = "",
        restarts: int | None = None,
        on_replaced: Callable[[C, C], None] = _ignore,
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
            patience_key: Configuration key of `patience`, for messages.
            restarts: Number of lost workers that are replaced; a start that fails while others live does not count. None:
                all are replaced, but a call fails at which two workers were lost, and quick deaths end the set.
            on_replaced: Receives each worker that took the place of a lost one, and the lost one.
        """
        self.restarts = restarts
        self._name = name
        self._start = start
        self._count = count
        self._deadlines = deadlines
        self._report = report
        self._silence = silence
        self._patience = patience
        self._patience_key = patience_key
        self._on_replaced = on_replaced
        self._open: Counter[C] = Counter()  # calls of each live worker
        self._latest: dict[int, C] = {}  # number -> its last worker, which may be dead
        self._starting = 0  # workers that are being started, or will be
        self._arrived = asyncio.Event()  # there is a worker, or the set has ended
        self._ended = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._ready: list[asyncio.Future[None]] = []  # of each keeper, once its first worker has started
        self._broken: Exception | None = None

    @property
    def alive(self) -> list[C]:
        """The workers that serve calls."""
        return list(self._open)

    @property
    def latest(self) -> list[C]:
        """The last worker of each number, which may be dead."""
        return list(self._latest.values())

    async def __aenter__(self) -> Self:
        """Start all workers; raise the first error if one cannot be started."""
        loop = asyncio.get_running_loop()
        self._ready = [loop.create_future() for _ in range(self._count)]
        self._starting = self._count
        self._keepers = [loop.create_task(self._keep(*each), name=self._name) for each in enumerate(self._ready)]
        try:
            await asyncio.gather(*self._ready)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all workers. One that is being started belongs to `start`, which is cancelled."""
        for keeper in self._keepers:
            keeper.cancel()
        closed = WorkerDiedError(f"the {self._name} were closed")
        self._break(closed)
        for ready in self._ready:
            fail(ready, closed)
        await asyncio.gather(*self._keepers, return_exceptions=True)
        alive, self._open = list(self._open), Counter()
        await asyncio.gather(*(worker.end() for worker in alive))

    # --- calls ---------------------------------------------------------------------------------------------------------

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker with the fewest open calls; of another one if that dies.

        Raises:
            DeadlyCallError: Two workers were lost at this call, and `restarts` has no limit.
            StallError: There was no worker for as long as one may take to start.
            AntiphonError: The workers cannot go on.
        """
        return await self.use(lambda worker: worker.call(method, *args), f"one call of {method}")

    async def use(self, work: Callable[[C], Awaitable[T]], name: str, cost: Callable[[C], Any] | None = None) -> T:
        """Await the work of one worker; of another one if that dies. Raises as `call` does.

        Args:
            work: Has a worker do it.
            name: What it is, for messages.
            cost: The worker for which this is least does the work; by default, the number of its open calls.
        """
        deaths = 0
        while True:
            await self._wait_for_one()
            worker = min(self._open, key=cost or self._open.__getitem__)
            self._open[worker] += 1
            try:
                return await work(worker)
            except AnswererDiedError:  # it asked for what is gone, and so would every other
                raise
            except WorkerDiedError as error:
                self._lose(worker, error)
                deaths += 1
                if deaths == MOST_DEATHS and self._broken is None and self.restarts is None:
                    message = f"{deaths} of the {self._name} were lost at {name}, the last one so: {error}"
                    raise DeadlyCallError(message) from error
            finally:
                if worker in self._open:
                    self._open[worker] -= 1

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of each worker that is alive, at least one; `WorkerDiedError` if one dies meanwhile."""
        await self._wait_for_one()
        return await asyncio.gather(*(worker.call(method, *args) for worker in self._open))

    async def unless_dead(self, worker: C, work: Awaitable[None]) -> None:
        """Await the work of a worker; go on without the worker if it dies."""
        try:
            await work
        except WorkerDiedError as error:
            self._lose(worker, error)

    async def raise_end(self) -> None:
        """Wait until the workers cannot go on, and raise why."""
        await self._ended.wait()
        assert self._broken is not None
        raise self._broken

    async def _wait_for_one(self) -> None:
        """Return when there is a worker; raise why if there will be none."""
        while not self._open and self._broken is None:
            self._arrived.clear()
            await self._wait(self._arrived.wait(), "worker", self._patience + RETRY_SECONDS[1], self._patience_key)
        if self._broken is not None:
            raise self._broken

    # --- life of a worker ----------------------------------------------------------------------------------------------

    async def _keep(self, number: int, ready: "asyncio.Future[None]") -> None:
        """Keep the worker of a number alive.

        Consumes its deaths, waits for it, is unblocked by its end or its silence, produces a worker in its place. The first
        start must succeed, else `ready` gets its error. A later error that is not about a process ends the set.
        """
        pause, deaths, loop = RETRY_SECONDS[0], 0, asyncio.get_running_loop()
        while True:
            try:
                worker = await self._wait(self._start(number), "start", self._patience, self._patience_key)
            except (WorkerDiedError, StallError) as error:
                if not ready.done():
                    fail(ready, error)  # the whole set is closed
                    return
                self._report(f"none of the {self._name} takes the place of one that was lost yet: {error}")
                if not self._may_retry(error):
                    return
            except Exception as error:  # noqa: BLE001 - named boundary: those who wait for the workers raise it
                fail(ready, error)
                self._break(error)
                return
            else:
                began = loop.time()
                self._add(number, worker)
                succeed(ready, None)
                death = await self._end_of(worker)
                self._lose(worker, death)
                if loop.time() - began >= RETRY_SECONDS[1]:
                    pause, deaths = RETRY_SECONDS[0], 0
                deaths += 1
                if not self._may_replace(death, deaths):
                    return
                if deaths == 1:
                    continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS[1])

    def _add(self, number: int, worker: C) -> None:
        lost = self._latest.get(number)
        self._latest[number] = worker
        self._open[worker] = 0
        self._arrived.set()
        self._starting -= 1
        if lost is not None:
            self._on_replaced(worker, lost)

    def _may_replace(self, death: AntiphonError, deaths: int = 0) -> bool:
        """Take one of the restarts; return False if there is none, and end the set if no worker is left either."""
        if self.restarts is None:
            if deaths >= QUICK_DEATHS and not self._open:
                self._break(death)
        elif self.restarts:
            self.restarts -= 1
        elif self._open or self._starting:
            return False
        else:
            self._break(death)
        if self._broken is not None:
            return False
        self._starting += 1
        return True

    def _may_retry(self, error: AntiphonError) -> bool:
        """Return True if a start that failed is to be tried again."""
        self._starting -= 1
        if self.restarts is not None and self._open:
            self.restarts += 1
        return self._may_replace(error)

    def _break(self, error: Exception) -> None:
        """Have all later calls fail with an error, the first of several."""
        self._broken = self._broken or error
        self._arrived.set()
        self._ended.set()

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

    async def _wait(self, awaitable: Awaitable[Any], name: str, deadline: float, key: str = "") -> Any:
        on = f"one of the {self._name}"
        return await self._deadlines.wait(awaitable, name=name, owner="run", on=on, deadline=deadline, key=key)
