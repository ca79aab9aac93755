"""Processes that begin with their imports done: forks of one that has made these and does nothing else.

To import torch and transformers takes a process three seconds, and a run has many that do. What is forked shares the memory
of what it begins with, too.
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
)  # the cores that a process is held to, and the GPUs that it sees


class ForkServer:
    """The process that is forked, as its controller has it."""

    def __init__(self, modules: Collection[str]) -> None:
        """It imports `modules`, those of them that there are."""
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
        """A process that serves the pipe `descriptor`, and has `output` for what it prints. `OSError` if nobody is there to be
        forked."""
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
        """Fork no more. What has been forked goes on; how it ends is not known."""
        self._process.kill()
        self._process.wait()
        self._line.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._line.close()


class ForkedProcess:
    """A process that a nursery has forked, with as much of `subprocess.Popen` as is needed."""

    def __init__(self, end: "Future[int | None]", kill: Callable[[], object]) -> None:
        self._end = end
        self._kill = kill

    @property
    def returncode(self) -> int | None:
        """How it ended; none if it has not, or nobody knows."""
        return self._end.result() if self._end.done() else None

    def wait(self, timeout: float) -> None:
        """Return once it has ended. `TimeoutError` if that takes longer than so many seconds."""
        self._end.result(timeout)

    def kill(self) -> None:
        """Have a SIGKILL sent to it."""
        with suppress(OSError):  # nobody is there to send it
            self._kill()


def serve_forks(descriptor: int, modules: Collection[str]) -> tuple[int, DeviceBinding]:
    """The life of a nursery. Each process that it forks returns from here, with the pipe that it is to serve, and where."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else a fork's collector would write to all that is there, and so copy it
    line, watched = socket.socket(fileno=descriptor), selectors.DefaultSelector()
    watched.register(line, selectors.EVENT_READ)
    children: dict[int, int] = {}  # processes, by the numbers that the controller has given them
    while True:
        for key, _ in watched.select():
            if key.fileobj is not line:
                watched.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(children.pop(key.data), 0)
                with suppress(BrokenPipeError):  # the controller is gone
                    line.send(pickle.dumps((key.data, os.waitstatus_to_exitcode(status))))
                continue
            message, given, *_ = socket.recv_fds(line, 4096, 2)
            if not message:
                os._exit(0)  # what the controller has had forked sees itself that it is gone
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
    """Close what is the nursery's, and print where the new process is to; returns its pipe."""
    for key in [*watched.get_map().values()]:
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        else:
            os.close(key.fd)
    watched.close()
    descriptor, *output = given
    for own in output:
        os.dup2(own, sys.stdout.fileno())
        os.dup2(own, sys.stderr.fileno())
        os.close(own)
    return descriptor
