"""Concurrent calls to a worker that has an event loop of its own.

`Client` is a `WorkerHandle` whose calls run at once and are answered as they are done; the worker it calls is an
`AsyncWorker`. Answers travel as `Reply` events of the handle beneath. The worker may ask its client back.
"""

import asyncio
import inspect
import itertools
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import AntiphonError, WorkerDiedError
from antiphon.core.workers import Worker, WorkerHandle

Handler = Callable[..., Coroutine[Any, Any, Any]]  # runs one call
Answerer = Callable[..., Awaitable[Any]]  # answers one question of a worker
STARTED = 0  # the call that is open from the beginning: answered once the worker serves calls


class AnswererDiedError(WorkerDiedError):
    """The process that answers questions of a worker has died; the worker itself has not."""


class Reply(NamedTuple):
    """Message of a worker to its client."""

    kind: str  # result, error or died; other kinds are between a worker and its client
    key: int  # of the call, if this answers one
    value: Any
    state: Any  # of the worker at this moment


class AsyncWorker(Worker):
    """Serves calls concurrently on an event loop in a thread of its own, which sends all of its messages."""

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._life = self._loop.create_task(self._live())
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    async def _live(self) -> None:
        """Start what it needs, `_serve`, and stop it again. An error raised here is the worker's death."""
        raise NotImplementedError

    def _state(self) -> Any:
        """Return the state that travels with each message."""

    async def _serve(self, owner: asyncio.TaskGroup, handlers: Mapping[str, Handler]) -> None:
        """Run calls with the handlers of their names, until the worker is closed."""
        self._owner, self._handlers = owner, handlers
        self._reply("result")
        await asyncio.Event().wait()

    def _reply(self, kind: str, key: int = STARTED, value: Any = None) -> None:
        self.emit(Reply(kind, key, value, self._state()))

    async def _ask(self, name: Hashable, *args: Any) -> Any:
        """Return what the client's answerer of a name returns, or raise what it raises. Cancelling this cancels it there."""
        number, answer = next(self._numbers), self._loop.create_future()
        self._questions[number] = answer
        try:
            self._reply("ask", number, (name, args))
            return await answer
        finally:
            del self._questions[number]
            if answer.cancelled():
                with suppress(OSError):  # the controller is gone
                    self._reply("unask", number)

    # --- sent by the client --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to live; a reply tells when it has started."""
        self._thread.start()

    def begin_call(self, key: int, method: str, args: tuple[Any, ...]) -> None:
        """Begin a call; a reply tells its result or error."""
        self._loop.call_soon_threadsafe(self._begin, key, method, args)

    def cancel_call(self, key: int) -> None:
        """Cancel a call."""
        self._loop.call_soon_threadsafe(self._cancel, key)

    def answer(self, number: int, well: bool, value: Any) -> None:
        """Take the answer to a question: what was returned, or if not `well` the error."""
        self._loop.call_soon_threadsafe(self._settle, number, well, value)

    def close(self) -> None:
        """Cancel everything that it runs, and end its thread."""
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
                self._reply("died", value=error if known else WorkerDiedError(f"it failed:\n{traceback.format_exc()}"))

    def _begin(self, key: int, method: str, args: tuple[Any, ...]) -> None:
        task = self._tasks[key] = self._owner.create_task(self._answer(key, method, args), name=method)
        task.add_done_callback(
            lambda _: self._tasks.pop(key)
        )  # one that is cancelled before it begins has no `finally`

    async def _answer(self, key: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            self._reply("result", key, await self._handlers[method](*args))
        except AntiphonError as error:
            self._reply("error", key, error)

    def _cancel(self, key: int) -> None:
        if (task := self._tasks.get(key)) is not None:
            task.cancel()

    def _settle(self, number: int, well: bool, value: Any) -> None:
        if (question := self._questions.get(number)) is not None:  # else whoever asked has given up
            (succeed if well else fail)(question, value)


class Client:
    """The controller's side of an `AsyncWorker`."""

    def __init__(self, handle: WorkerHandle, answerers: Mapping[Hashable, Answerer] | None = None) -> None:
        """Start a worker; it may ask `answerers` by their names."""
        self._handle = handle
        self._answerers = answerers or {}
        self._answering: dict[int, asyncio.Task[None]] = {}  # by the number of the question
        self._keys = itertools.count(STARTED + 1)
        self._answers: dict[int, asyncio.Future[Any]] = {STARTED: asyncio.get_running_loop().create_future()}
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        handle.on_event(self._on_reply)
        handle.on_death(self._on_death)
        handle.send("start")

    async def started(self) -> None:
        """Return once the worker serves calls."""
        await self._answers[STARTED]

    async def started_or_killed(self) -> None:
        """Return once the worker serves calls. One that does not come to it belongs to nobody and may hang: it is killed."""
        try:
            await self.started()
        except BaseException:
            self.kill()
            raise

    async def died(self) -> None:
        """Return never; raise the error that the worker died of."""
        await asyncio.shield(self._death)

    async def call(self, method: str, *args: Any) -> Any:
        """Run `method` in the worker beside other calls. Cancelling this cancels it there."""
        key, answer = next(self._keys), asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        try:
            self._handle.send("begin_call", key, method, args)
            return await answer
        finally:
            del self._answers[key]
            if answer.cancelled():
                with suppress(AntiphonError):  # it is dead
                    self._handle.send("cancel_call", key)

    def kill(self) -> None:
        """End the worker by force."""
        self._handle.kill()

    async def end(self) -> None:
        """End the worker."""
        await self._handle.close()

    def _on_reply(self, reply: Reply) -> None:
        match reply.kind:
            case "result" | "error" if (answer := self._answers.get(reply.key)) is not None:
                (succeed if reply.kind == "result" else fail)(answer, reply.value)
            case "ask":
                task = asyncio.get_running_loop().create_task(self._answer(reply.key, *reply.value), name="answer")
                self._answering[reply.key] = task
                task.add_done_callback(lambda _: self._answering.pop(reply.key))
            case "unask" if (asked := self._answering.get(reply.key)) is not None:
                asked.cancel()
            case "died":
                self.kill()
                self._on_death(reply.value)

    async def _answer(self, number: int, name: Hashable, args: tuple[Any, ...]) -> None:
        try:
            answer = True, await self._answerers[name](*args)
        except WorkerDiedError as error:
            answer = False, AnswererDiedError(str(error))
        except Exception as error:  # noqa: BLE001 - named boundary: it goes to whoever asked
            answer = False, error
        with suppress(AntiphonError):  # it is dead
            self._handle.send("answer", number, *answer)

    def _on_death(self, error: AntiphonError) -> None:
        for task in self._answering.values():
            task.cancel()
        for answer in (self._death, *self._answers.values()):
            fail(answer, error)


C = TypeVar("C", bound=type[Client])


def handlers_of(target: object) -> dict[str, Handler]:
    """Return the handlers of an object's public async methods, by their names."""
    return {name: getattr(target, name) for name in _async_methods(type(target))}


def forwards(surface: type) -> Callable[[C], C]:
    """Class decorator for clients that derive from `surface`: run its async methods in the worker.

    Methods that the client defines itself, or `Client` does, are left as they are.
    """

    def decorate(client: C) -> C:
        for name in _async_methods(surface):
            if getattr(client, name) is getattr(surface, name):
                setattr(client, name, _forward(getattr(surface, name)))
        return client

    return decorate


def _async_methods(owner: type) -> Iterator[str]:
    for name in dir(owner):
        if not name.startswith("_") and inspect.iscoroutinefunction(getattr(owner, name)):
            yield name


def _forward(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @wraps(method)
    async def call(self: Client, *args: Any, **options: Any) -> Any:
        bound = signature.bind(self, *args, **options)
        return await self.call(method.__name__, *bound.args[1:])

    return call
