"""The two ends of a worker, whatever carries the bytes between them: `Handle` with the controller, `serve` in the worker.

A message is a pickle of its own, so what arrives is the receiver's to change, and a message that cannot be read is an
error of the worker and not of what carried it.
"""

import asyncio
import itertools
import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from antiphon.core.deadlines import fail
from antiphon.core.errors import AntiphonError, WorkerDied
from antiphon.core.registry import import_path
from antiphon.core.workers import Worker

GRACE = 10.0  # seconds a worker has to end by itself

Inbox = queue.SimpleQueue[bytes | None]  # what the worker is to do, one message each; None ends it

# Workers that are threads of one process are built one at a time: to load a model, transformers sets torch's default dtype
# for all of them, and puts back what it found.
_BUILDING = threading.Lock()


class Handle:
    """The controller's end of one worker: a `WorkerHandle` but for `kill`. What carries the messages calls `_receive`
    with each in order, then `_end`, on the event loop's thread; it gives `_transmit` and `_stop`."""

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
        """See `WorkerHandle.call`."""
        key = next(self._ids)
        answer = self._calls[key] = self._loop.create_future()
        self._post(key, method, args)
        return await answer

    def send(self, method: str, *args: Any) -> None:
        """See `WorkerHandle.send`."""
        self._post(None, method, args)

    def on_event(self, callback: Callable[[Any], None]) -> None:
        """See `WorkerHandle.on_event`."""
        self._callback = callback

    def on_death(self, callback: Callable[[AntiphonError], None]) -> None:
        """See `WorkerHandle.on_death`."""
        self._death.add_done_callback(lambda _: callback(_death_error(self._reason)))

    async def died(self) -> None:
        """See `WorkerHandle.died`."""
        await asyncio.shield(self._death)

    async def close(self) -> None:
        """See `WorkerHandle.close`."""
        if not self._closing:
            self._closing = True
            await self._stop()
            self._end(f"worker {self.name} was closed")

    def _transmit(self, content: bytes) -> None:
        """Carry a message to the worker. If it cannot be carried, `_end`."""
        raise NotImplementedError

    async def _stop(self) -> None:
        """End the worker: politely first, by force after `GRACE`."""
        raise NotImplementedError

    def _post(self, key: int | None, method: str, args: tuple[Any, ...]) -> None:
        if not self._death.done():
            self._transmit(pickle.dumps((key, method, args), protocol=pickle.HIGHEST_PROTOCOL))
        if self._death.done():
            raise _death_error(self._reason)

    def _receive(self, content: bytes) -> None:
        """A message has come from the worker."""
        kind, key, value = pickle.loads(content)
        if kind == "event":
            self._callback(value)
        elif kind == "died":
            self._reason = value if isinstance(value, AntiphonError) else f"worker {self.name} failed:\n{value}"
        elif key is not None and not (answer := self._calls.pop(key)).done():
            if kind == "result":
                answer.set_result(value)
            else:
                answer.set_exception(value)

    def _end(self, reason: str) -> None:
        """Nothing comes from the worker any more: for the reason that it gave itself, else for this one."""
        if self._death.done():
            return
        self._reason = self._reason or reason
        error = _death_error(self._reason)
        fail(self._death, error)
        for answer in self._calls.values():
            fail(answer, error)
        self._calls.clear()


def _death_error(reason: str | AntiphonError) -> AntiphonError:
    """What callers of a dead worker get: the clear error it left, or that it died."""
    return reason if isinstance(reason, AntiphonError) else WorkerDied(reason)


def serve(factory: str, args: tuple[Any, ...], inbox: Inbox, transmit: Callable[[bytes], None]) -> None:
    """The life of a worker: build it, answer calls, advance its own work in between. Its last message says why it
    ends, unless it was told to."""

    def post(kind: str, key: int | None, value: Any) -> None:
        transmit(pickle.dumps((kind, key, value), protocol=pickle.HIGHEST_PROTOCOL))

    try:
        with _BUILDING:
            worker: Worker = import_path(factory, "worker")(*args)
        worker.emit = lambda event: post("event", None, event)
        _answer(worker, inbox, post)
        worker.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the controller is gone; so is the reason to live
    except AntiphonError as error:  # a message to the user, which the controller gives
        with suppress(OSError):
            post("died", None, error)
    except BaseException:  # noqa: BLE001 - the boundary at which a worker's death becomes a message
        with suppress(OSError):
            post("died", None, traceback.format_exc())
        traceback.print_exc()


def _answer(worker: Worker, inbox: Inbox, post: Callable[[str, int | None, Any], None]) -> None:
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


def redirect_output(log: Path) -> None:
    """Send what this process prints to the end of `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)
