"""Calls between a controller (`Handle`) and its worker (`serve`), whatever carries the messages.

Each message is a separate pickle. The receiver thus owns what arrives, and a message that cannot be read is an error of the
worker rather than of the transport. A worker may have seen a model's output, so what it sends may hold data only.
"""

import asyncio
import itertools
import pickle
import queue
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from antiphon.core.data_pickles import dump_data, load_data
from antiphon.core.deadlines import fail
from antiphon.core.errors import AntiphonError, WorkerDiedError
from antiphon.core.registry import import_path
from antiphon.core.workers import Worker

GRACE = 10.0  # seconds for a worker to end by itself

Inbox = queue.SimpleQueue[bytes | None]  # messages for the worker; None ends it

# Workers that are threads of one process are built one at a time: while it loads a model, transformers changes torch's default
# dtype for the whole process.
_BUILDING = threading.Lock()


class Handle:
    """The controller's end of one worker.

    A transport implements `kill`, `_transmit` and `_stop`. On the event loop's thread it calls `_receive` with each message in
    order, and `_end` at the end.
    """

    def __init__(self, name: str, log: Path | None) -> None:
        self.name = name
        self._where = f"; its output is in {log}" if log else ""
        self._ids = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._callback: Callable[[Any], None] = lambda event: None
        self._death: asyncio.Future[None] = self._loop.create_future()
        self._reason: str | AntiphonError = ""
        self._closing = False

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker and return its result."""
        key = next(self._ids)
        answer = self._calls[key] = self._loop.create_future()
        self._post(key, method, args)
        return await answer

    def send(self, method: str, *args: Any) -> None:
        """Call a method of the worker without waiting for a result."""
        self._post(None, method, args)

    def on_event(self, callback: Callable[[Any], None]) -> None:
        """Set the function that is called with each event of the worker."""
        self._callback = callback

    def on_death(self, callback: Callable[[AntiphonError], None]) -> None:
        """Have a function called with the reason when the worker has ended."""
        self._death.add_done_callback(lambda _: callback(_death_error(self._reason)))

    async def died(self) -> None:
        """Never return; raise the reason when the worker ends."""
        await asyncio.shield(self._death)

    def kill(self) -> None:
        """Kill the worker."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the worker. A second call does nothing."""
        if not self._closing:
            self._closing = True
            await self._stop()
            self._end(f"worker {self.name} was closed")

    def _transmit(self, content: bytes) -> None:
        """Send a message to the worker; if it has ended, nothing is sent."""
        raise NotImplementedError

    async def _stop(self) -> None:
        """Ask the worker to end, and kill it after `GRACE` seconds."""
        raise NotImplementedError

    def _post(self, key: int | None, method: str, args: tuple[Any, ...]) -> None:
        if not self._death.done():
            self._transmit(pickle.dumps((key, method, args), protocol=pickle.HIGHEST_PROTOCOL))
        if self._death.done():
            raise _death_error(self._reason)

    def _receive(self, content: bytes) -> None:
        """Handle a message from the worker."""
        kind, key, value = self._read(content)
        if kind == "event":
            self._callback(value)
        elif kind == "died":
            self._reason = value if isinstance(value, AntiphonError) else f"worker {self.name} failed:\n{value}"
        elif key is not None and not (answer := self._calls.pop(key)).done():
            if kind == "result":
                answer.set_result(value)
            else:
                answer.set_exception(value)

    def _read(self, content: bytes) -> tuple[str, int | None, Any]:
        """Return kind, key and value of a message. A worker whose message is not data is ended."""
        try:
            kind, key, value = load_data(content)
            _check_message(kind, key, value, self._calls)
        except Exception as error:  # noqa: BLE001 - named boundary: a worker may send anything
            self._reason = f"worker {self.name} sent a message that is not data: {error}{self._where}"
            self.kill()
            self._end(self._reason)
            return "", None, None
        return kind, key, value

    def _end(self, reason: str) -> None:
        """Mark the worker as ended, for the reason that it gave itself or else for this one."""
        if self._death.done():
            return
        self._reason = self._reason or reason
        error = _death_error(self._reason)
        fail(self._death, error)
        for answer in self._calls.values():
            fail(answer, error)
        self._calls.clear()


def _check_message(kind: object, key: object, value: object, calls: Mapping[int, object]) -> None:
    """Raise `ValueError` unless a worker may send this."""
    kinds = {"event": (object,), "result": (object,), "error": (AntiphonError,), "died": (AntiphonError, str)}
    if type(kind) is not str or kind not in kinds or not isinstance(value, kinds[kind]):
        raise ValueError(f"{kind!r} with {type(value).__name__}")
    if kind in ("result", "error") and (type(key) is not int or key not in calls):
        raise ValueError(f"{kind!r} of a call that nobody made")


def _death_error(reason: str | AntiphonError) -> AntiphonError:
    """Return the error for callers of a dead worker: the one that it left, or `WorkerDiedError`."""
    return reason if isinstance(reason, AntiphonError) else WorkerDiedError(reason)


def serve(factory: str, args: tuple[Any, ...], inbox: Inbox, transmit: Callable[[bytes], None]) -> None:
    """Run a worker: build it, answer calls, and advance its own work in between.

    If it ends without having been told to, its last message says why.
    """

    def post(kind: str, key: int | None, value: Any) -> None:
        transmit(dump_data((kind, key, value)))

    try:
        with _BUILDING:
            worker: Worker = import_path(factory, "worker")(*args)
        worker.emit = lambda event: post("event", None, event)
        _answer(worker, inbox, post)
        worker.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the controller has ended, so the worker ends too
    except AntiphonError as error:  # a message for the user, which the controller shows
        with suppress(OSError):
            post("died", None, error)
    except BaseException:  # noqa: BLE001 - named boundary: a worker's death becomes a message
        with suppress(OSError):
            post("died", None, traceback.format_exc())
        traceback.print_exc()


def _answer(worker: Worker, inbox: Inbox, post: Callable[[str, int | None, Any], None]) -> None:
    """Answer calls in the order they arrive, and advance the worker's own work in between, while there is more of it."""
    more = worker.advance()
    while True:
        try:
            message = inbox.get(block=not more)
        except queue.Empty:
            more = worker.advance()
            continue
        if message is None:
            return
        key, method, args = pickle.loads(message)
        try:
            result = getattr(worker, method)(*args)
        except AntiphonError as error:
            if key is None:
                raise
            post("error", key, error)
        else:
            if key is not None:
                post("result", key, result)
        more = more or (inbox.empty() and worker.advance())
