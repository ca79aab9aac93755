"""Workers that are asked several things at once: each has an event loop of its own, and answers as it is done.

The worker is an `AsyncWorker`, what the controller holds is a `Client`. Workers answer with `Reply` messages.
"""

import asyncio
import itertools
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import AntiphonError, WorkerDied
from antiphon.core.workers import Worker, WorkerHandle

Handler = Callable[..., Coroutine[Any, Any, Any]]  # what answers a question
STARTED = 0  # the question that every worker is asked first: has it started?


class Reply(NamedTuple):
    """What a worker says."""

    kind: str  # result, error or died; what else there is is known to those who say and hear it
    key: int  # of the question, if it is an answer
    value: Any
    state: Any  # of the worker, as it says this


class AsyncWorker(Worker):
    """The worker's side. All that it says, its loop says."""

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._life = self._loop.create_task(self._live())
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    async def _live(self) -> None:
        """Make what it needs, `_serve`, and take it apart again. An error that this raises is the worker's death."""
        raise NotImplementedError

    def _state(self) -> Any:
        """What is said with every word."""

    async def _serve(self, owner: asyncio.TaskGroup, does: Mapping[str, Handler]) -> None:
        """Answer questions, by their names, until it is closed."""
        self._owner, self._does = owner, does
        self._say("result")
        await asyncio.Event().wait()

    def _say(self, kind: str, key: int = STARTED, value: Any = None) -> None:
        """Tell the controller."""
        self.emit(Reply(kind, key, value, self._state()))

    # --- what the controller sends -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; a word tells when it has started."""
        self._thread.start()

    def ask(self, key: int, method: str, args: tuple[Any, ...]) -> None:
        """Do something; a word tells when it is done, and what came of it."""
        self._loop.call_soon_threadsafe(self._begin, key, method, args)

    def cancel(self, key: int) -> None:
        """Do something no more."""
        self._loop.call_soon_threadsafe(self._stop, key)

    def close(self) -> None:
        """End all that it runs."""
        self._loop.call_soon_threadsafe(self._life.cancel)
        if self._thread.is_alive():
            self._thread.join()
        self._loop.close()

    # --- on its own loop -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._life)
        except asyncio.CancelledError:
            pass  # it was closed
        except BaseException as error:  # noqa: BLE001 - the boundary at which its end becomes a message
            traceback.print_exc()
            known = isinstance(error, AntiphonError)
            with suppress(OSError):  # the controller is gone
                self._say("died", value=error if known else WorkerDied(f"it failed:\n{traceback.format_exc()}"))

    def _begin(self, key: int, method: str, args: tuple[Any, ...]) -> None:
        self._tasks[key] = self._owner.create_task(self._answer(key, method, args), name=method)

    async def _answer(self, key: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            self._say("result", key, await self._does[method](*args))
        except AntiphonError as error:
            self._say("error", key, error)
        finally:
            del self._tasks[key]

    def _stop(self, key: int) -> None:
        if (task := self._tasks.get(key)) is not None:
            task.cancel()


class Client:
    """The controller's side."""

    def __init__(self, handle: WorkerHandle) -> None:
        self._handle = handle
        self._keys = itertools.count(STARTED + 1)
        self._answers: dict[int, asyncio.Future[Any]] = {STARTED: asyncio.get_running_loop().create_future()}
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        handle.on_event(self._hear)
        handle.on_death(self._end)
        handle.send("start")

    async def started(self) -> None:
        """Return once it can be asked."""
        await self._answers[STARTED]

    async def died(self) -> None:
        """Return never; raise what it died of."""
        await asyncio.shield(self._death)

    async def ask(self, method: str, *args: Any) -> Any:
        """The answer to a question; others are answered meanwhile. Cancelling this cancels what the worker does for it."""
        key, answer = next(self._keys), asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        try:
            self._handle.send("ask", key, method, args)
            return await answer
        finally:
            del self._answers[key]
            if answer.cancelled():
                with suppress(AntiphonError):  # it is dead
                    self._handle.send("cancel", key)

    def kill(self) -> None:
        """End it by force."""
        self._handle.kill()

    def _hear(self, word: Reply) -> None:
        """The worker has said something."""
        match word.kind:
            case "result" | "error" if (answer := self._answers.get(word.key)) is not None:
                (succeed if word.kind == "result" else fail)(answer, word.value)
            case "died":
                self.kill()
                self._end(word.value)

    def _end(self, error: AntiphonError) -> None:
        for answer in (self._death, *self._answers.values()):
            fail(answer, error)
