"""A fork server: a process that has imported large packages and is forked for each child.

Importing torch and transformers takes a process about three seconds, and a run has many such processes. Forks also share the
memory of the imported packages.
"""

import gc
import importlib
import itertools
import json
import os
import selectors
import signal
import socket
import threading
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from antiphon.core.processes.child import Child, start_python
from antiphon.core.processes.own_process import redirect_output
from antiphon.core.registry import import_path


class ForkServer:
    """The parent's side of a fork server."""

    def __init__(self, entry: str, modules: Collection[str]) -> None:
        """Start the server.

        Args:
            entry: Function that each forked process calls, `package.module:function`.
            modules: The server imports those that are installed.
        """
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            server = f"{__name__}:{run.__name__}"
            self._process = start_python(server, theirs.fileno(), entry, [*modules], descriptors=[theirs.fileno()])
        self._numbers = itertools.count()
        self._ends: dict[int, Future[int | None]] = {}
        self._listener = threading.Thread(target=self._listen, name="fork-server", daemon=True)
        self._listener.start()

    def fork(self, descriptor: int, output: int | None, *args: Any) -> Child:
        """Fork a process.

        Args:
            descriptor: Descriptor that the process inherits, the first argument of its function.
            output: Descriptor that takes what it prints; None for this process's output.
            args: Further arguments of the function, which JSON can represent.

        Raises:
            OSError: The server has ended.
        """
        number, end = next(self._numbers), Future[int | None]()
        end.set_running_or_notify_cancel()  # nobody who waits can cancel it
        self._ends[number] = end
        given = [descriptor] if output is None else [descriptor, output]
        socket.send_fds(self._line, [json.dumps([number, args]).encode()], given)
        return Child(end, lambda signal_number: self._line.send(json.dumps([number, signal_number]).encode()))

    def _listen(self) -> None:
        with suppress(OSError):
            while message := self._line.recv(1024):
                number, code = json.loads(message)
                self._ends.pop(number).set_result(code)
        for end in list(self._ends.values()):
            end.set_result(None)

    def close(self) -> None:
        """End the server. Forked processes continue, but their exit codes are no longer reported."""
        self._process.kill()
        self._process.join()
        self._line.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._line.close()


def run(descriptor: int, entry: str, modules: Collection[str]) -> None:
    """Run the fork server; in each forked process, call the entry instead."""
    main = import_path(entry, "entry")
    inherited, args = _serve_forks(descriptor, modules)
    main(inherited, *args)


def _serve_forks(descriptor: int, modules: Collection[str]) -> tuple[int, list[Any]]:
    """Fork on request.

    The server itself never returns from here. Each forked process does.

    Returns:
        The descriptor that the forked process was given, and its other arguments.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # otherwise a collection in a fork would write to these objects and so copy them
    line, watched = socket.socket(fileno=descriptor), selectors.DefaultSelector()
    watched.register(line, selectors.EVENT_READ)
    children: dict[int, int] = {}  # process ids by the parent's numbers
    while True:
        for key, _ in watched.select():
            if key.fileobj is not line:
                watched.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(children.pop(key.data), 0)
                with suppress(BrokenPipeError):  # the parent has ended
                    line.send(json.dumps([key.data, os.waitstatus_to_exitcode(status)]).encode())
                continue
            message, given, *_ = socket.recv_fds(line, 1 << 16, 2)
            if not message:
                os._exit(0)  # forked processes notice by themselves that the parent has ended
            number, order = json.loads(message)
            if isinstance(order, int):  # a signal
                if number in children:
                    os.kill(children[number], order)
                continue
            if not (child := os.fork()):
                return _enter_child(given, watched), order
            children[number] = child
            watched.register(os.pidfd_open(child), selectors.EVENT_READ, number)
            for inherited in given:
                os.close(inherited)


def _enter_child(given: list[int], watched: selectors.BaseSelector) -> int:
    """Close the server's descriptors in a forked process, redirect its output, and return the descriptor it was given."""
    for key in [*watched.get_map().values()]:
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        else:
            os.close(key.fd)
    watched.close()
    descriptor, *output = given
    for file in output:
        redirect_output(file)
        os.close(file)
    return descriptor
