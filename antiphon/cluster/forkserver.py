"""A fork server: a process that has imported large packages and is forked for each worker.

Importing torch and transformers takes a process about three seconds, and a run has many such processes. Forks also share the
memory of the imported packages.
"""

import gc
import importlib
import itertools
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress

DeviceBinding = (
    tuple[tuple[int, ...], tuple[str, ...]] | None
)  # cores that a process is bound to, and GPUs that it sees; None: all


class ForkServer:
    """The controller's side of a fork server."""

    def __init__(self, modules: Collection[str]) -> None:
        """Start the server. It imports those of `modules` that are installed."""
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = (
                f"import sys; sys.path[:] = {sys.path!r}; from antiphon.cluster import forkserver, local; "
                f"local.main(*forkserver.serve_forks({theirs.fileno()}, {[*modules]!r}))"
            )
            command = [sys.executable, "-u", "-c", program]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._numbers = itertools.count()
        self._ends: dict[int, Future[int | None]] = {}
        self._listener = threading.Thread(target=self._listen, name="fork-server", daemon=True)
        self._listener.start()

    def fork(self, descriptor: int, output: int | None, at: DeviceBinding) -> "ForkedProcess":
        """Fork a process.

        Args:
            descriptor: Pipe that the process serves.
            output: Descriptor that takes what it prints.
            at: Devices of the process.

        Raises:
            OSError: The server has ended.
        """
        number, end = next(self._numbers), Future[int | None]()
        self._ends[number] = end
        given = [descriptor] if output is None else [descriptor, output]
        socket.send_fds(self._line, [pickle.dumps((number, at))], given)
        return ForkedProcess(end, lambda: self._line.send(pickle.dumps(number)))

    def _listen(self) -> None:
        with suppress(OSError):
            while message := self._line.recv(1024):
                number, code = pickle.loads(message)
                self._ends.pop(number).set_result(code)
        for end in list(self._ends.values()):
            end.set_result(None)

    def close(self) -> None:
        """End the server. Forked processes continue, but their exit codes are no longer reported."""
        self._process.kill()
        self._process.wait()
        self._line.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._line.close()


class ForkedProcess:
    """A process forked by a `ForkServer`, with the part of `subprocess.Popen`'s interface that is needed."""

    def __init__(self, end: "Future[int | None]", kill: Callable[[], object]) -> None:
        self._end = end
        self._kill = kill

    @property
    def returncode(self) -> int | None:
        """The exit code; None if the process still runs or its end is unknown."""
        return self._end.result() if self._end.done() else None

    def wait(self, timeout: float) -> None:
        """Wait until it has ended; raise `TimeoutError` after `timeout` seconds."""
        self._end.result(timeout)

    def kill(self) -> None:
        """Have the server send it SIGKILL."""
        with suppress(OSError):  # the server has ended
            self._kill()


def serve_forks(descriptor: int, modules: Collection[str]) -> tuple[int, DeviceBinding]:
    """Run the fork server.

    The server itself never returns from here. Each forked process does.

    Returns:
        The pipe that the forked process serves, and its devices.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # otherwise a collection in a fork would write to these objects and so copy them
    line, watched = socket.socket(fileno=descriptor), selectors.DefaultSelector()
    watched.register(line, selectors.EVENT_READ)
    children: dict[int, int] = {}  # process ids by the controller's numbers
    while True:
        for key, _ in watched.select():
            if key.fileobj is not line:
                watched.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(children.pop(key.data), 0)
                with suppress(BrokenPipeError):  # the controller has ended
                    line.send(pickle.dumps((key.data, os.waitstatus_to_exitcode(status))))
                continue
            message, given, *_ = socket.recv_fds(line, 4096, 2)
            if not message:
                os._exit(0)  # forked processes notice by themselves that the controller has ended
            order = pickle.loads(message)
            if isinstance(order, int):
                if order in children:
                    os.kill(children[order], signal.SIGKILL)
                continue
            number, at = order
            if not (child := os.fork()):
                return _enter_child(given, watched), at
            children[number] = child
            watched.register(os.pidfd_open(child), selectors.EVENT_READ, number)
            for descriptor in given:
                os.close(descriptor)


def _enter_child(given: list[int], watched: selectors.BaseSelector) -> int:
    """Close the server's descriptors in a forked process, redirect its output, and return the pipe that it serves."""
    for key in [*watched.get_map().values()]:
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        else:
            os.close(key.fd)
    watched.close()
    descriptor, *output = given
    for target in output:
        os.dup2(target, sys.stdout.fileno())
        os.dup2(target, sys.stderr.fileno())
        os.close(target)
    return descriptor
