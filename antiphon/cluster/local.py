"""Workers as processes of this machine, or as threads of this process (`debug`), over one pipe each.

The child reads its pipe in a thread, so that a controller never blocks on a worker that is computing. The controller
reads on its event loop. The end of the pipe is the death of the worker: no polling, no heartbeat.

A process is started with the interpreter that runs this one, or with one of another environment, whose packages are then
its own; only the import path and the two ends of the pipe are handed to it.
"""

import asyncio
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from antiphon.errors import AntiphonError, ConfigError, UnsupportedError, WorkerDied
from antiphon.registry import import_path
from antiphon.waits import fail
from antiphon.workers import Worker

GRACE = 10.0  # seconds a worker has to end by itself


class LocalCluster:
    """Spawns workers on this machine. Each process writes what it prints to `<logs>/<name>.log`."""

    def __init__(self, *, debug: bool = False, logs: Path | None = None) -> None:
        self.debug = debug
        self.logs = logs
        self._handles: list[LocalHandle] = []

    def spawn(self, name: str, factory: str, *args: Any, python: str = "") -> "LocalHandle":
        """See `Cluster.spawn`. To be called on the event loop's thread."""
        if self.debug and python:
            raise UnsupportedError(
                f"worker {name} needs another interpreter, {python}: with cluster.debug it is a thread"
            )
        ours, theirs = multiprocessing.Pipe()
        log = None if self.logs is None or self.debug else self.logs / f"{name}.log"
        runner: subprocess.Popen[bytes] | threading.Thread
        if self.debug:
            runner = threading.Thread(target=_serve, args=(theirs, factory, args), name=name, daemon=True)
            runner.start()
        else:
            order = pickle.dumps((factory, args), protocol=pickle.HIGHEST_PROTOCOL)
            with theirs:
                runner = _start(python, theirs.fileno(), log)
            with suppress(OSError):  # it is dead already; the handle will find that, and say why
                ours.send_bytes(order)
        handle = LocalHandle(name, ours, runner, log)
        self._handles.append(handle)
        return handle

    async def close(self) -> None:
        """End all workers, all at once."""
        await asyncio.gather(*(handle.close() for handle in self._handles))


class LocalHandle:
    """The controller's end of one worker."""

    def __init__(
        self,
        name: str,
        connection: Connection,
        runner: "subprocess.Popen[bytes] | threading.Thread",
        log: Path | None,
    ) -> None:
        self.name = name
        self._connection = connection
        self._runner = runner
        self._log = log
        self._ids = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._callback: Callable[[Any], None] = lambda event: None
        self._death: asyncio.Future[None] = self._loop.create_future()
        self._reason: str | AntiphonError = ""
        self._closing = False
        self._loop.add_reader(connection.fileno(), self._read)

    @property
    def pid(self) -> int | None:
        """The worker's process id; None when it is a thread."""
        return None if isinstance(self._runner, threading.Thread) else self._runner.pid

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
        self._death.add_done_callback(lambda _: callback(_death(self._reason)))

    async def died(self) -> None:
        """See `WorkerHandle.died`."""
        await asyncio.shield(self._death)

    async def close(self) -> None:
        """See `WorkerHandle.close`."""
        if self._closing:
            return
        self._closing = True
        with suppress(OSError):
            self._connection.send_bytes(pickle.dumps(None))
        if not await self._loop.run_in_executor(None, self._ended) and not isinstance(self._runner, threading.Thread):
            self._runner.kill()
            await self._loop.run_in_executor(None, self._ended)
        self._end(f"worker {self.name} was closed")

    def kill(self) -> None:
        """See `WorkerHandle.kill`. A thread cannot be ended from outside; it is left alone and no longer listened to."""
        if isinstance(self._runner, threading.Thread):
            self._end(f"worker {self.name} was given up")
        else:
            self._runner.kill()

    def _post(self, key: int | None, method: str, args: tuple[Any, ...]) -> None:
        if self._death.done():
            raise _death(self._reason)
        try:
            self._connection.send_bytes(pickle.dumps((key, method, args), protocol=pickle.HIGHEST_PROTOCOL))
        except OSError:
            self._read()  # why it died may be there already, unread
            raise _death(self._reason) from None

    def _read(self) -> None:
        try:
            while self._connection.poll():
                self._dispatch(*pickle.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            self._end(self._obituary())

    def _dispatch(self, kind: str, key: int | None, value: Any) -> None:
        if kind == "event":
            self._callback(value)
        elif kind == "died":
            self._reason = value if isinstance(value, AntiphonError) else f"worker {self.name} failed:\n{value}"
        elif key is not None and not (answer := self._calls.pop(key)).done():
            if kind == "result":
                answer.set_result(value)
            else:
                answer.set_exception(value)

    def _end(self, reason: str | AntiphonError) -> None:
        if self._death.done():
            return
        self._reason = reason
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
        error = _death(reason)
        fail(self._death, error)
        for answer in self._calls.values():
            fail(answer, error)
        self._calls.clear()

    def _ended(self) -> bool:
        """Whether the worker ends within the grace period."""
        if isinstance(self._runner, threading.Thread):
            self._runner.join(GRACE)
            return not self._runner.is_alive()
        with suppress(subprocess.TimeoutExpired):
            self._runner.wait(GRACE)
        return self._runner.returncode is not None

    def _obituary(self) -> str | AntiphonError:
        if self._reason:
            return self._reason
        where = f"; its output is in {self._log}" if self._log else ""
        if isinstance(self._runner, threading.Thread):
            return f"worker {self.name} ended"
        self._ended()
        code = self._runner.returncode
        if code is not None and code < 0:
            return f"worker {self.name} was killed by {signal.Signals(-code).name}{where}"
        return f"worker {self.name} ended with exit code {code}{where}"


def _death(reason: str | AntiphonError) -> AntiphonError:
    """What callers of a dead worker get: the clear error it left, or that it died."""
    return reason if isinstance(reason, AntiphonError) else WorkerDied(reason)


# What a process runs. Its own packages come with its interpreter.
_PROGRAM = "import sys; sys.path[:] = {path}; from antiphon.cluster.local import main; main({descriptor})"


def _start(python: str, descriptor: int, log: Path | None) -> "subprocess.Popen[bytes]":
    """A process that will serve the pipe `descriptor`."""
    path = f"sys.path + {_own_folders()!r}" if python else repr(sys.path)
    command = [python or sys.executable, "-u", "-c", _PROGRAM.format(path=path, descriptor=descriptor)]
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") if log else nullcontext() as output:
        try:
            return subprocess.Popen(
                command, pass_fds=[descriptor], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        except OSError as error:
            raise ConfigError(f"the interpreter {command[0]!r} cannot be run: {error.strerror}") from error


def _own_folders() -> list[str]:
    """The import path without what is installed here, which means nothing to another interpreter."""
    standard = sysconfig.get_path("stdlib")
    folders = dict.fromkeys(Path(folder).absolute() for folder in sys.path)
    return [
        str(folder)
        for folder in folders
        if folder.is_dir()
        and not folder.is_relative_to(standard)
        and not {"site-packages", "dist-packages"} & {*folder.parts}
    ]


def main(descriptor: int) -> None:
    """The life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller, which closes its workers
    connection = Connection(descriptor)
    factory, args = pickle.loads(connection.recv_bytes())
    _serve(connection, factory, args)


def _serve(connection: Connection, factory: str, args: tuple[Any, ...]) -> None:
    """The life of a worker: build it, answer calls, advance its own work in between."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()

    def post(kind: str, key: int | None, value: Any) -> None:
        connection.send_bytes(pickle.dumps((kind, key, value), protocol=pickle.HIGHEST_PROTOCOL))

    try:
        worker: Worker = import_path(factory, "worker")(*args)
        worker.emit = lambda event: post("event", None, event)
        _answer(worker, inbox, post)
        worker.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the controller is gone; so is the reason to live
    except BaseException as error:  # noqa: BLE001 - the boundary at which a worker's death becomes a message
        with suppress(OSError):
            post("died", None, error if isinstance(error, AntiphonError) else traceback.format_exc())
        traceback.print_exc()
    finally:
        # Closing alone would not be noticed while the other thread reads, and this may be a thread of the controller.
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


def _answer(worker: Worker, inbox: "queue.SimpleQueue[Any]", post: Callable[[str, int | None, Any], None]) -> None:
    more = worker.advance()
    while True:
        try:
            message = inbox.get(block=not more)
        except queue.Empty:
            more = worker.advance()
            continue
        if message is None:
            return
        key, method, args = message
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


def _receive(connection: Connection, inbox: "queue.SimpleQueue[Any]") -> None:
    message: Any = ...
    while message is not None:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            message = None  # the controller is gone
        inbox.put(message)
