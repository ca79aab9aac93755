"""Python programs and fork servers that start at once: forks of a process that has imported what they import.

Most of the time of a run as small as those of the tests goes into imports: 12 of 16 seconds of a processor, once in the program
and once in its fork server. Each process of tests has one warm process. Everything else about a run is as it is for a user: a
process of its own, with workers of its own, which signals end. `--cold` starts each program by an interpreter; so does an
environment that a test has changed, because packages read theirs when they are imported.
"""

import functools
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import types
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

from antiphon.core.processes import forkserver
from antiphon.core.processes.child import Child, start_python
from antiphon.core.processes.forkserver import ForkServer
from antiphon.core.processes.framing import read_frame, write_frame


class WarmProcess:
    """The process that has imported the packages. Fork servers of this process are forked from it, too."""

    def __init__(self, start, modules):
        forkserver.start_python = start
        self._server = ForkServer(f"{__name__}:{enter.__name__}", modules)
        self._environment = _own(os.environ)
        self.fork = self._server.fork
        forkserver.start_python = lend

    def serves(self, environment):
        return _own(environment) == self._environment


@functools.cache
def warm_process():
    return WarmProcess(start_python, ["tests.warm_imports"])


def use(warm):
    """Start the fork servers of this process from its warm process, or as always."""
    forkserver.start_python = lend if warm else start_python


def start(*arguments, environment=None, directory=None):
    """Start `python ARGUMENTS`, which begin with -m or -c; its output is piped, as text."""
    arguments = [*map(str, arguments)]
    environment = dict(os.environ) if environment is None else environment
    if forkserver.start_python is not lend or not warm_process().serves(environment):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, *arguments], text=True, env=environment, cwd=directory, **pipes)
    return Program(arguments, environment, directory or os.getcwd())


def run(*arguments, timeout=240, **settings):
    """Run `python ARGUMENTS` to its end, and return what it printed."""
    with start(*arguments, **settings) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


class Program:
    """A program of the warm process, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, arguments, environment, directory):
        self.args = arguments
        self.returncode = None
        path = _fresh_path(environment.get("PYTHONPATH", ""))
        order = {"arguments": arguments, "environment": environment, "directory": str(directory), "path": path}
        out, err = os.pipe(), os.pipe()
        line, theirs = socket.socketpair()
        with line, open(os.devnull) as nothing:
            with theirs:
                self._child = warm_process().fork(theirs.fileno(), None)
            socket.send_fds(line, [b"!"], [nothing.fileno(), out[1], err[1]])
            write_frame(line, json.dumps(order).encode())
            self.pid = int(read_frame(line))
        os.close(out[1])
        os.close(err[1])
        self.stdout, self.stderr = os.fdopen(out[0]), os.fdopen(err[0])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stdout.close()
        self.stderr.close()
        self.wait()

    def poll(self):
        self.returncode = self._child.exit_code
        return self.returncode

    def wait(self, timeout=None):
        try:
            self._child.join(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self.args, timeout) from None
        return self.poll()

    def communicate(self, timeout=None):
        end = None if timeout is None else time.monotonic() + timeout
        read = {self.stdout: b"", self.stderr: b""}
        with selectors.DefaultSelector() as open_streams:
            for stream in read:
                if not stream.closed:  # as a Popen, it may be asked again
                    open_streams.register(stream, selectors.EVENT_READ)
            while open_streams.get_map():
                ready = open_streams.select(None if end is None else max(0, end - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                for key, _ in ready:
                    if content := os.read(key.fd, 1 << 16):
                        read[key.fileobj] += content
                    else:
                        open_streams.unregister(key.fileobj)
        self.wait(None if end is None else max(0, end - time.monotonic()))
        self.stdout.close()
        self.stderr.close()
        return tuple(content.decode() for content in read.values())

    def send_signal(self, number):
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def lend(server, descriptor, *arguments, descriptors):
    """Start a fork server, as `start_python` does."""
    if not warm_process().serves(os.environ):
        return start_python(server, descriptor, *arguments, descriptors=descriptors)
    return warm_process().fork(descriptor, None, os.getcwd(), [*sys.path], *arguments)


def enter(descriptor, *order):
    """Become a program or, by order, a fork server, in a process that was forked for it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order:
        directory, sys.path[:], *arguments = order
        os.chdir(directory)
        forkserver.run(descriptor, *arguments)
    else:
        _run_program(descriptor)


def _run_program(descriptor):
    with socket.socket(fileno=descriptor) as line:
        _, files, _, _ = socket.recv_fds(line, 1, 3)
        order = json.loads(read_frame(line))
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(order["directory"])
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.path[:] = [order["directory"], *order["path"]]
        _keep_a_fork()
        write_frame(line, str(os.getpid()).encode())
    kind, program, *arguments = order["arguments"]
    sys.argv[:] = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = ""
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(program, main.__dict__)


def _keep_a_fork():
    """Fork this program while it has one thread, for its fork servers."""

    def fork(server, descriptor, *arguments, descriptors):
        if child := os.fork():
            end = Future()
            end.set_running_or_notify_cancel()
            Thread(target=lambda: end.set_result(os.waitpid(child, 0)[1]), daemon=True).start()
            return Child(end, functools.partial(os.kill, child))
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, 1024)
        forkserver.run(descriptor, *arguments)
        sys.exit()

    own = WarmProcess(fork, ())
    globals()["warm_process"] = lambda: own


def _own(environment):
    """Leave out what pytest and torch set by themselves, what is read when it is used, and what is passed on apart."""
    others = ("PYTEST_", "TORCHINDUCTOR_", "COLUMNS", "PYTHONPATH")
    return {name: value for name, value in environment.items() if not name.startswith(others)}


@functools.cache
def _fresh_path(own):
    """The import path of a new interpreter, but for its first entry, with an own PYTHONPATH."""
    command = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    environment = {**os.environ, "PYTHONPATH": own}
    return json.loads(subprocess.run(command, capture_output=True, check=True, env=environment).stdout)
