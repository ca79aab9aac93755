"""Workers as processes of this machine, or as threads of this process (`debug`), with one socket each.

The worker reads its socket in a thread, so that the controller never blocks on a worker that is computing. The end of the
socket means that the worker has ended, so neither polling nor heartbeats are needed.

A process runs the same interpreter as the controller, or that of another environment with its own packages; it gets only the
import path and its end of the socket. With the same interpreter it is forked from a process that has imported the large
packages, where that is safe (`antiphon.core.processes.forkserver`).
"""

import asyncio
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from antiphon.cluster.calls import GRACE, Handle, Inbox, serve
from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.core.objects import pack_objects, receive_objects
from antiphon.core.processes.child import Child, describe_exit, start_python
from antiphon.core.processes.framing import FrameConnection, read_frame, write_frame
from antiphon.core.processes.own_process import end_process, open_log

if TYPE_CHECKING:  # another interpreter then imports only those of our modules that its worker uses
    from collections.abc import Collection, Sequence

    from antiphon.cluster.base import Node, Place
    from antiphon.cluster.config import ClusterConfig
    from antiphon.core.processes.forkserver import ForkServer

    DeviceBinding: TypeAlias = (
        tuple[Sequence[int], Sequence[str]] | None
    )  # cores it is bound to, GPUs it sees; None: all

MAIN = f"{__name__}:main"  # the function of a worker's process
END = b""  # ends a worker; no pickle is empty
PRELOADED_MODULES = ("torch", "transformers.modeling_utils")  # most workers import these first, and they take longest


class LocalCluster:
    """Spawns workers on this machine."""

    def __init__(self, config: "ClusterConfig", logs: Path | None = None) -> None:
        """Start nothing yet. Each process writes what it prints to `<logs>/<name>.log`."""
        self._debug = config.debug
        self._env = config.env
        if config.debug:
            _add_environment(config.env)
        self._logs = logs
        self._handles: list[LocalHandle] = []
        self._forks = config.fork and _can_fork()
        self._fork_server: ForkServer | None = None  # started with the first worker

    def nodes(self) -> "list[Node]":
        """Return this machine, with the devices that this process may use."""
        from antiphon.cluster.devices import this_machine

        return [this_machine()]

    async def reserve(self, places: "Collection[Place]") -> None:
        """Do nothing: nobody manages the devices of this machine."""

    def spawn(
        self, name: str, factory: str, *args: Any, python: str = "", place: "Place | None" = None
    ) -> "LocalHandle":
        """Start a worker. Must be called on the event loop's thread."""
        if self._debug and python:
            raise UnsupportedError(
                f"worker {name} needs another interpreter ({python}), but with cluster.debug it would be a thread",
                key="cluster.debug",
                value=True,
            )
        ours, theirs = socket.socketpair()
        if self._debug:
            child, log = _start_thread(name, theirs, factory, args), None
        else:
            order = pickle.dumps((self._env, pack_objects(), factory, args), protocol=pickle.HIGHEST_PROTOCOL)
            log = None if self._logs is None else self._logs / f"{name}.log"
            try:
                with theirs:
                    child = self._start(python, theirs.fileno(), log, place)
            except BaseException:
                ours.close()
                raise
        handle = LocalHandle(name, ours, child, log, is_thread=self._debug)
        if not self._debug:
            handle.start(order)
        self._handles.append(handle)
        return handle

    async def close(self) -> None:
        """End all workers at the same time."""
        await asyncio.gather(*(handle.close() for handle in self._handles))
        if self._fork_server is not None:
            self._fork_server.close()

    def _start(self, python: str, descriptor: int, log: Path | None, place: "Place | None") -> Child:
        """Start a process that serves the socket `descriptor`."""
        at = (place.cores, place.gpus) if place and (place.cores or place.gpus) else None
        with open_log(log) if log else nullcontext() as output:
            if python or not self._forks:
                return _start_interpreter(python, descriptor, output, at)
            from antiphon.core.processes.forkserver import ForkServer

            self._fork_server = self._fork_server or ForkServer(MAIN, PRELOADED_MODULES)
            try:
                return self._fork_server.fork(descriptor, output.fileno() if output else None, at)
            except OSError:  # the fork server has ended, for example because memory was short
                self._fork_server.close()
                self._fork_server = None
                return _start_interpreter(python, descriptor, output, at)


class LocalHandle(Handle):
    """The controller's end of one worker's socket."""

    def __init__(self, name: str, ours: socket.socket, child: Child, log: Path | None, *, is_thread: bool) -> None:
        super().__init__(name, log)
        self._child = child
        self._is_thread = is_thread
        self._connection = FrameConnection(ours, self._receive, self._on_end_of_socket)
        self._outbox: list[bytes] = []  # messages of this iteration of the event loop
        self._last_words: asyncio.Task[None] | None = None

    def start(self, order: bytes) -> None:
        """Tell a process which worker to build. Must come before every call."""
        self._connection.send(order)

    def kill(self) -> None:
        """Kill the worker. A thread cannot be ended from outside; it is abandoned."""
        if self._is_thread:
            self._end(f"worker {self.name} was abandoned")
        else:
            self._child.kill()

    async def _stop(self) -> None:
        self._flush()
        self._connection.send(END)
        if not await self._child.wait(GRACE) and not self._is_thread:
            self._child.kill()
            await self._child.wait(GRACE)

    def _transmit(self, content: bytes) -> None:
        """Queue a message. All messages of one iteration of the event loop are sent together.

        Each write can cost the controller its processor to the worker that it wakes, and hundreds of episodes may have a
        request for the same engine.
        """
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(content)

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if messages:
            self._connection.send(pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL))

    def _on_end_of_socket(self) -> None:
        self._last_words = self._loop.create_task(self._report_death())

    async def _report_death(self) -> None:
        if not self._reason:
            await self._child.wait(GRACE)
        self._end(f"worker {self.name} {describe_exit(self._child.exit_code)}{self._where}")

    def _end(self, reason: str) -> None:
        self._connection.close()
        super()._end(reason)


def _start_interpreter(python: str, descriptor: int, output: IO[bytes] | None, at: "DeviceBinding") -> Child:
    """Start a process with its own interpreter."""
    try:
        return start_python(MAIN, descriptor, at, descriptors=[descriptor], python=python, output=output)
    except OSError as error:
        interpreter = python or sys.executable
        message = f"the interpreter {interpreter!r} cannot be run: {error.strerror}"
        raise ConfigError(message, value=interpreter) from error


def _start_thread(name: str, connection: socket.socket, factory: str, args: tuple[Any, ...]) -> Child:
    """Start a worker in a thread, which no signal reaches."""
    end = Future[int | None]()
    end.set_running_or_notify_cancel()

    def run() -> None:
        try:
            with connection:
                _run_worker(connection, factory, args)
        finally:
            end.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return Child(end, lambda number: None)


def _can_fork() -> bool:
    """Return True if workers can be forked. CUDA and the system libraries of macOS do not survive a fork."""
    from antiphon.cluster.devices import has_gpu_driver

    if sys.platform != "linux" or has_gpu_driver():
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # an old C library or kernel
        return False
    return True


def main(descriptor: int, place: "DeviceBinding") -> None:
    """Run a worker process."""
    if place is not None:
        from antiphon.cluster.devices import bind_process

        bind_process(*place)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller, which closes its workers
    connection = socket.socket(fileno=descriptor)
    if (order := read_frame(connection)) is not None:  # else the controller has ended
        env, objects, factory, args = pickle.loads(order)
        _add_environment(env)
        receive_objects(objects)
        _run_worker(connection, factory, args, alone=True)
    end_process()


def _add_environment(variables: dict[str, str]) -> None:
    if variables:  # else a worker of another interpreter is spared the import
        from antiphon.core.config import add_environment

        add_environment(variables)


def _run_worker(connection: socket.socket, factory: str, args: tuple[Any, ...], *, alone: bool = False) -> None:
    """Run a worker at its end of the socket; `alone` if it has a process of its own."""
    inbox: Inbox = queue.SimpleQueue()
    receiver = threading.Thread(target=_receive_messages, args=(connection, inbox, alone), daemon=True)
    receiver.start()
    try:
        serve(factory, args, inbox, partial(write_frame, connection))
    finally:
        with suppress(OSError):  # a plain close would go unnoticed while the other thread reads
            connection.shutdown(socket.SHUT_RDWR)
        if not alone:
            receiver.join()


def _receive_messages(connection: socket.socket, inbox: Inbox, alone: bool) -> None:
    gone = alone
    with suppress(OSError):  # the controller has ended
        while content := read_frame(connection):
            for message in pickle.loads(content):
                inbox.put(message)
        gone = alone and content is None
    inbox.put(None)
    if gone:  # the controller cannot kill this process any more
        time.sleep(GRACE)
        os._exit(1)
