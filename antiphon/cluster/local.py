"""Workers as processes of this machine, or as threads of this process (`debug`), over one pipe each.

The child reads its pipe in a thread, so that a controller never blocks on a worker that is computing. The controller
reads on its event loop. The end of the pipe is the death of the worker: no polling, no heartbeat.
"""

import asyncio
import multiprocessing
import os
import queue
import signal
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.messages import GRACE, Handle, Inbox, redirect_output, serve

END = b""  # no pickle is empty


class LocalCluster:
    """Spawns workers on this machine."""

    def __init__(self, config: ClusterConfig, logs: Path | None = None) -> None:
        """Each process writes what it prints to `<logs>/<name>.log`."""
        self._debug = config.debug
        self._logs = logs
        self._handles: list[LocalHandle] = []

    def spawn(self, name: str, factory: str, *args: Any) -> "LocalHandle":
        """See `Cluster.spawn`. To be called on the event loop's thread."""
        ours, theirs = multiprocessing.Pipe()
        log = None if self._logs is None or self._debug else self._logs / f"{name}.log"
        runner: multiprocessing.process.BaseProcess | threading.Thread
        if self._debug:
            runner = threading.Thread(target=_live, args=(theirs, factory, args, None), name=name, daemon=True)
            runner.start()
        else:
            # Spawned, not forked: torch's threads and the event loop do not survive a fork.
            spawn = multiprocessing.get_context("spawn")
            runner = spawn.Process(target=_live, args=(theirs, factory, args, log), name=name, daemon=True)
            runner.start()
            theirs.close()
        handle = LocalHandle(name, ours, runner, log)
        self._handles.append(handle)
        return handle

    async def close(self) -> None:
        """End all workers, all at once."""
        await asyncio.gather(*(handle.close() for handle in self._handles))


class LocalHandle(Handle):
    """The controller's end of one worker's pipe."""

    def __init__(
        self,
        name: str,
        connection: Connection,
        runner: multiprocessing.process.BaseProcess | threading.Thread,
        log: Path | None,
    ) -> None:
        super().__init__(name, log)
        self._connection = connection
        self._runner = runner
        self._loop.add_reader(connection.fileno(), self._read)

    def kill(self) -> None:
        """See `WorkerHandle.kill`. A thread cannot be ended from outside; it is left alone and no longer listened to."""
        if isinstance(self._runner, threading.Thread):
            self._end(f"worker {self.name} was given up")
        else:
            self._runner.kill()

    async def _stop(self) -> None:
        with suppress(OSError):
            self._connection.send_bytes(END)
        await self._loop.run_in_executor(None, self._runner.join, GRACE)
        if self._runner.is_alive() and not isinstance(self._runner, threading.Thread):
            self._runner.kill()
            await self._loop.run_in_executor(None, self._runner.join, GRACE)

    def _transmit(self, content: bytes) -> None:
        try:
            self._connection.send_bytes(content)
        except OSError:
            self._read()  # why it died may be there already, unread
            self._end(self._obituary())

    def _read(self) -> None:
        try:
            while self._connection.poll():
                self._receive(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._end(self._obituary())

    def _end(self, reason: str) -> None:
        if not self._connection.closed:
            self._loop.remove_reader(self._connection.fileno())
            self._connection.close()
        super()._end(reason)

    def _obituary(self) -> str:
        if self._reason or isinstance(self._runner, threading.Thread):
            return f"worker {self.name} ended"
        self._runner.join(GRACE)
        code = self._runner.exitcode
        if code is not None and code < 0:
            return f"worker {self.name} was killed by {signal.Signals(-code).name}{self._where}"
        return f"worker {self.name} ended with exit code {code}{self._where}"


def _live(connection: Connection, factory: str, args: tuple[Any, ...], log: Path | None) -> None:
    """The worker's end of the pipe."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller, which closes its workers
    if log is not None:
        redirect_output(log)
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    try:
        serve(factory, args, inbox, connection.send_bytes)
    finally:
        # Closing alone would not be noticed while the other thread reads, and this may be a thread of the controller.
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


def _listen(connection: Connection, inbox: Inbox) -> None:
    with suppress(EOFError, OSError):  # the controller is gone
        while (content := connection.recv_bytes()) != END:
            inbox.put(content)
    inbox.put(None)
