"""Workers as processes of this machine, or as threads of this process (`debug`), over one pipe each.

The child reads its pipe in a thread, so that a controller never blocks on a worker that is computing. The controller
reads on its event loop. The end of the pipe is the death of the worker: no polling, no heartbeat.

A process is started with the interpreter that runs this one, or with one of another environment, whose packages are then
its own; only the import path and the two ends of the pipe are handed to it. With this one it is a fork of one that has
imported what takes long, where that can be (`antiphon.cluster.forkserver`).
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

if TYPE_CHECKING:  # another interpreter needs of our packages only what its worker uses
    from collections.abc import Collection

    from antiphon.cluster.base import Node, Place
    from antiphon.cluster.config import ClusterConfig
    from antiphon.cluster.forkserver import DeviceBinding, ForkedProcess, ForkServer

    Process: TypeAlias = subprocess.Popen[bytes] | ForkedProcess

END = b""  # no pickle is empty
BEGUN_WITH = ("torch", "transformers.modeling_utils")  # what most workers import first, and takes longest


class LocalCluster:
    """Spawns workers on this machine."""

    def __init__(self, config: "ClusterConfig", logs: Path | None = None) -> None:
        """Each process writes what it prints to `<logs>/<name>.log`."""
        self._debug = config.debug
        self._logs = logs
        self._handles: list[LocalHandle] = []
        self._forks = config.fork and _can_fork()
        self._fork_server: ForkServer | None = None  # once there is something to fork

    def nodes(self) -> "list[Node]":
        """See `Cluster.nodes`: this machine, as far as this process may use it."""
        from antiphon.cluster.devices import this_machine

        return [this_machine()]

    async def reserve(self, places: "Collection[Place]") -> None:
        """See `Cluster.reserve`: nobody gives out the devices of this machine."""

    def spawn(
        self, name: str, factory: str, *args: Any, python: str = "", place: "Place | None" = None
    ) -> "LocalHandle":
        """See `Cluster.spawn`. To be called on the event loop's thread."""
        if self._debug and python:
            raise UnsupportedError(
                f"worker {name} needs another interpreter, {python}: with cluster.debug it is a thread"
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
            with suppress(OSError):  # it is dead already; the handle will find that, and say why
                ours.send_bytes(order)
        handle = LocalHandle(name, ours, runner, log)
        self._handles.append(handle)
        return handle

    async def close(self) -> None:
        """End all workers, all at once."""
        await asyncio.gather(*(handle.close() for handle in self._handles))
        if self._fork_server is not None:
            self._fork_server.close()

    def _start(self, python: str, descriptor: int, log: Path | None, place: "Place | None") -> "Process":
        """A process that will serve the pipe `descriptor`."""
        at = (place.cores, place.gpus) if place and (place.cores or place.gpus) else None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") if log else nullcontext() as output:
            if python or not self._forks:
                return _start_interpreter(python, descriptor, output, at)
            from antiphon.cluster.forkserver import ForkServer

            self._fork_server = self._fork_server or ForkServer(BEGUN_WITH)
            try:
                return self._fork_server.fork(descriptor, output.fileno() if output else None, at)
            except OSError:  # it is dead, as when memory was short
                self._fork_server.close()
                self._fork_server = None
                return _start_interpreter(python, descriptor, output, at)


class LocalHandle(Handle):
    """The controller's end of one worker's pipe: a list of messages each way down, one message each way up."""

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
        self._outbox: list[bytes] = []  # messages of this turn of the loop
        self._loop.add_reader(connection.fileno(), self._read)

    def kill(self) -> None:
        """See `WorkerHandle.kill`. A thread cannot be ended from outside; it is left alone and no longer listened to."""
        if isinstance(self._runner, threading.Thread):
            self._end(f"worker {self.name} was given up")
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
        """What one turn of the loop has for a worker goes there at once: to write may mean to be kept from the processor by the
        worker that it wakes, and hundreds of episodes can have a request for the same engine."""
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
            self._read()  # why it died may be there already, unread
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
        """Whether the worker ends within the grace period."""
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


# What a process runs. Its own packages come with its interpreter.
_PROGRAM = "import sys; sys.path[:] = {path}; from antiphon.cluster.local import main; main({descriptor}, {place})"


def _start_interpreter(
    python: str, descriptor: int, output: IO[bytes] | None, at: "DeviceBinding"
) -> "subprocess.Popen[bytes]":
    """A process of its own interpreter."""
    path = f"sys.path + {_project_folders()!r}" if python else repr(sys.path)
    command = [python or sys.executable, "-u", "-c", _PROGRAM.format(path=path, descriptor=descriptor, place=at)]
    try:
        return subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    except OSError as error:
        raise ConfigError(f"the interpreter {command[0]!r} cannot be run: {error.strerror}") from error


def _can_fork() -> bool:
    """Whether a fork is as good as a process that was started: CUDA does not survive one, nor do macOS's own libraries."""
    from antiphon.cluster.devices import has_gpu_driver

    if sys.platform != "linux" or has_gpu_driver():
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel
        return False
    return True


def _project_folders() -> list[str]:
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


def main(descriptor: int, place: "DeviceBinding") -> None:
    """The life of a worker process."""
    if place is not None:
        from antiphon.cluster.devices import bind_process

        bind_process(*place)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller, which closes its workers
    connection = Connection(descriptor)
    factory, args = pickle.loads(connection.recv_bytes())
    _run_worker(connection, factory, args, alone=True)


def _run_worker(connection: Connection, factory: str, args: tuple[Any, ...], *, alone: bool = False) -> None:
    """The worker's end of the pipe; `alone` in a process."""
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_receive_messages, args=(connection, inbox, alone), daemon=True).start()
    try:
        serve(factory, args, inbox, connection.send_bytes)
    finally:
        # Closing alone would not be noticed while the other thread reads, and this may be a thread of the controller.
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


def _receive_messages(connection: Connection, inbox: Inbox, alone: bool) -> None:
    gone = alone
    with suppress(EOFError, OSError):  # the controller is gone
        while (content := connection.recv_bytes()) != END:
            for message in pickle.loads(content):
                inbox.put(message)
        gone = False
    inbox.put(None)
    if gone:  # nobody is there to end by force what does not end by itself
        time.sleep(GRACE)
        os._exit(1)
