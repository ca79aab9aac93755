"""Workers as processes of this machine, or as threads of this process (`debug`), with one pipe each.

The worker reads its pipe in a thread, so that the controller never blocks on a worker that is computing. The controller reads
on its event loop. The end of the pipe means that the worker has ended, so neither polling nor heartbeats are needed.

A process runs the same interpreter as the controller, or that of another environment with its own packages; it gets only the
import path and its end of the pipe. With the same interpreter it is forked from a process that has imported the large packages,
where that is safe (`antiphon.cluster.forkserver`).
"""

import asyncio
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
import time
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from antiphon.cluster.framing import GRACE, Handle, Inbox, serve
from antiphon.core.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:  # another interpreter then imports only those of our modules that its worker uses
    from collections.abc import Collection

    from antiphon.cluster.base import Node, Place
    from antiphon.cluster.config import ClusterConfig
    from antiphon.cluster.forkserver import DeviceBinding, ForkedProcess, ForkServer

    Process: TypeAlias = subprocess.Popen[bytes] | ForkedProcess

END = b""  # ends a worker; no pickle is empty
PRELOADED_MODULES = ("torch", "transformers.modeling_utils")  # most workers import these first, and they take longest


class LocalCluster:
    """Spawns workers on this machine."""

    def __init__(self, config: "ClusterConfig", logs: Path | None = None) -> None:
        """Start nothing yet. Each process writes what it prints to `<logs>/<name>.log`."""
        self._debug = config.debug
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
                f"worker {name} needs another interpreter ({python}), but with cluster.debug it would be a thread"
            )
        ours, theirs = multiprocessing.Pipe()
        log = None if self._logs is None or self._debug else self._logs / f"{name}.log"
        runner: Process | threading.Thread
        if self._debug:
            runner = threading.Thread(target=_run_worker, args=(theirs, factory, args), name=name, daemon=True)
            runner.start()
        else:
            order = pickle.dumps((factory, args), protocol=pickle.HIGHEST_PROTOCOL)
            with theirs:
                runner = self._start(python, theirs.fileno(), log, place)
            with suppress(OSError):  # it has ended already; the handle will notice, and say why
                ours.send_bytes(order)
        handle = LocalHandle(name, ours, runner, log)
        self._handles.append(handle)
        return handle

    async def close(self) -> None:
        """End all workers at the same time."""
        await asyncio.gather(*(handle.close() for handle in self._handles))
        if self._fork_server is not None:
            self._fork_server.close()

    def _start(self, python: str, descriptor: int, log: Path | None, place: "Place | None") -> "Process":
        """Start a process that serves the pipe `descriptor`."""
        at = (place.cores, place.gpus) if place and (place.cores or place.gpus) else None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") if log else nullcontext() as output:
            if python or not self._forks:
                return _start_interpreter(python, descriptor, output, at)
            from antiphon.cluster.forkserver import ForkServer

            self._fork_server = self._fork_server or ForkServer(PRELOADED_MODULES)
            try:
                return self._fork_server.fork(descriptor, output.fileno() if output else None, at)
            except OSError:  # the fork server has ended, for example because memory was short
                self._fork_server.close()
                self._fork_server = None
                return _start_interpreter(python, descriptor, output, at)


class LocalHandle(Handle):
    """The controller's end of one worker's pipe. It sends lists of messages and receives single ones."""

    def __init__(
        self,
        name: str,
        connection: Connection,
        runner: "Process | threading.Thread",
        log: Path | None,
    ) -> None:
        super().__init__(name, log)
        self._connection = connection
        self._runner = runner
        self._outbox: list[bytes] = []  # messages of this iteration of the event loop
        self._loop.add_reader(connection.fileno(), self._read)

    def kill(self) -> None:
        """Kill the worker. A thread cannot be ended from outside; it is abandoned."""
        if isinstance(self._runner, threading.Thread):
            self._end(f"worker {self.name} was abandoned")
        else:
            self._runner.kill()

    async def _stop(self) -> None:
        self._flush()
        with suppress(OSError):
            self._connection.send_bytes(END)
        if not await self._loop.run_in_executor(None, self._wait_for_end) and not isinstance(
            self._runner, threading.Thread
        ):
            self._runner.kill()
            await self._loop.run_in_executor(None, self._wait_for_end)

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
        if not messages or self._connection.closed:
            return
        try:
            self._connection.send_bytes(pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL))
        except OSError:
            self._read()  # the reason may have arrived unread
            self._end(self._describe_death())

    def _read(self) -> None:
        try:
            while self._connection.poll():
                self._receive(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._end(self._describe_death())

    def _end(self, reason: str) -> None:
        if not self._connection.closed:
            self._loop.remove_reader(self._connection.fileno())
            self._connection.close()
        super()._end(reason)

    def _wait_for_end(self) -> bool:
        """Wait for the grace period; return True if the worker has ended."""
        if isinstance(self._runner, threading.Thread):
            self._runner.join(GRACE)
            return not self._runner.is_alive()
        with suppress(subprocess.TimeoutExpired, TimeoutError):
            self._runner.wait(GRACE)
        return self._runner.returncode is not None

    def _describe_death(self) -> str:
        if self._reason or isinstance(self._runner, threading.Thread):
            return f"worker {self.name} ended"
        self._wait_for_end()
        code = self._runner.returncode
        if code is not None and code < 0:
            return f"worker {self.name} was killed by {signal.Signals(-code).name}{self._where}"
        return f"worker {self.name} ended with exit code {code}{self._where}"


# The program of a process. Its packages come with its interpreter.
_PROGRAM = "import sys; sys.path[:] = {path}; from antiphon.cluster.local import main; main({descriptor}, {place})"


def _start_interpreter(
    python: str, descriptor: int, output: IO[bytes] | None, at: "DeviceBinding"
) -> "subprocess.Popen[bytes]":
    """Start a process with its own interpreter."""
    path = f"sys.path + {_project_folders()!r}" if python else repr(sys.path)
    command = [python or sys.executable, "-u", "-c", _PROGRAM.format(path=path, descriptor=descriptor, place=at)]
    try:
        return subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    except OSError as error:
        raise ConfigError(f"the interpreter {command[0]!r} cannot be run: {error.strerror}") from error


def _can_fork() -> bool:
    """Return True if workers can be forked. CUDA and the system libraries of macOS do not survive a fork."""
    from antiphon.cluster.devices import has_gpu_driver

    if sys.platform != "linux" or has_gpu_driver():
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel
        return False
    return True


def _project_folders() -> list[str]:
    """Return the import path without installed packages, which another interpreter cannot use."""
    standard = sysconfig.get_path("stdlib")
    folders = dict.fromkeys(Path(folder).absolute() for folder in sys.path)
    return [
        str(folder)
        for folder in folders
        if folder.is_dir()
        and not folder.is_relative_to(standard)
        and not {"site-packages", "dist-packages"} & {*folder.parts}
    ]


def main(descriptor: int, place: "DeviceBinding") -> None:
    """Run a worker process."""
    if place is not None:
        from antiphon.cluster.devices import bind_process

        bind_process(*place)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller, which closes its workers
    connection = Connection(descriptor)
    factory, args = pickle.loads(connection.recv_bytes())
    _run_worker(connection, factory, args, alone=True)


def _run_worker(connection: Connection, factory: str, args: tuple[Any, ...], *, alone: bool = False) -> None:
    """Run a worker at its end of the pipe; `alone` if it has a process of its own."""
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_receive_messages, args=(connection, inbox, alone), daemon=True).start()
    try:
        serve(factory, args, inbox, connection.send_bytes)
    finally:
        # A plain close would go unnoticed while the other thread reads, and this may be a thread of the controller.
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


def _receive_messages(connection: Connection, inbox: Inbox, alone: bool) -> None:
    gone = alone
    with suppress(EOFError, OSError):  # the controller has ended
        while (content := connection.recv_bytes()) != END:
            for message in pickle.loads(content):
                inbox.put(message)
        gone = False
    inbox.put(None)
    if gone:  # the controller cannot kill this process any more
        time.sleep(GRACE)
        os._exit(1)
