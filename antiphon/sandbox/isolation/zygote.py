"""The zygote: a clean Python process that forks workers, which fork programs.

    zygote    one per sandbox; enters the private root and forks workers on request
    worker    the first process of its process namespace; runs one program after another (`worker`)
    program   one per run; forked by the worker, it gives up every right and becomes the program (`program`)

Only the program process runs untrusted code, and it never returns to trusted code: its worker learns from the kernel how it
ended. The worker reads nothing that a program wrote, nor the programs themselves, which travel from the client to the program
process in a sealed memory file.

The zygote and the workers end when their socket closes or the client's process ends. All three modules run in confined
processes: they import the standard library and modules of this directory that do the same.
"""

import contextlib
import gc
import json
import marshal
import os
import resource
import shutil
import signal
import socket
import sys
import types
from pathlib import Path

from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation import cgroups, kernel
from antiphon.sandbox.isolation.protocol import LARGEST_MESSAGE, WorkerSetup, ZygoteSetup, wait_readable
from antiphon.sandbox.isolation.worker import Worker

# Modules that most programs import. Each one adds to the time of every fork, which copies its pages.
_PRELOADED = """
    abc bisect collections contextlib copy dataclasses datetime decimal enum fractions functools hashlib heapq io itertools json
    math operator random re statistics string textwrap threading time traceback typing
"""


def main(descriptor: int, modules: int) -> None:
    """Serve the client at the other end of a socket until it closes the socket.

    Args:
        descriptor: The socket.
        modules: Descriptor of a file with marshalled code objects by module name. Programs find these modules imported.
    """
    connection = socket.socket(fileno=descriptor)
    setup = ZygoteSetup(**json.loads(connection.recv(LARGEST_MESSAGE)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        zygote = _Zygote(setup, modules)
    except (OSError, ImportError) as error:
        connection.send(json.dumps({"problem": str(error)}).encode())
        return
    connection.send(json.dumps({"group": str(zygote.group_path or "")}).encode())
    zygote.serve(connection)


class _Zygote:
    """Forks workers and removes their control groups when they have ended."""

    def __init__(self, setup: ZygoteSetup, modules: int) -> None:
        self._setup = setup
        self._client = os.pidfd_open(setup.client_pid)
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self._group: cgroups.Group | None = None
        self.group_path: Path | None = None
        self._workers: dict[int, cgroups.Group | None] = {}  # by process id
        self._count = 0
        with contextlib.suppress(OSError):  # without a control group, memory is bounded per process
            self._group, self.group_path = cgroups.make_group(f"antiphon-{os.getpid()}")
        if setup.level >= Level.ISOLATED:
            self._enter_namespaces()
        else:
            kernel.make_opaque()  # its programs, and those of others, may have the same user
        self._import_modules(modules)
        self._base_memory = _own_memory(self._proc)
        gc.collect()
        gc.freeze()  # a collection in a fork would write to these objects and so copy their pages

    def _enter_namespaces(self) -> None:
        namespaces = kernel.NEW_MOUNTS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_UTS | kernel.NEW_CGROUP
        uid, gid = os.getuid(), os.getgid()
        if self._setup.user_namespace:
            kernel.unshare(namespaces | kernel.NEW_USER)
            kernel.map_user(self._proc, 0, uid, gid)
        else:
            kernel.unshare(namespaces)
        kernel.enter_root(self._setup.sources)

    def _import_modules(self, modules: int) -> None:
        """Import what programs will find imported, then hide our own modules from them."""
        sys.path.extend(self._setup.paths)
        for name in (*_PRELOADED.split(), *self._setup.imports):
            __import__(name)
        with open(modules, "rb") as file:
            given = {name: (types.ModuleType(name), code) for name, code in marshal.load(file).items()}
        for module, code in given.values():
            sys.modules[module.__name__] = module
            exec(code, vars(module))
        if self._setup.level >= Level.CONFINED:
            self._setup.filter_program()  # cached here, so that no fork has to build it
        ours = [name for name in sys.modules if name.partition(".")[0] == "antiphon" and name not in given]
        self._own_modules = {name: sys.modules.pop(name) for name in ours}

    def serve(self, connection: socket.socket) -> None:
        """Fork a worker for each message, which carries a user id and the worker's socket."""
        while wait_readable([connection.fileno(), self._client]) == connection.fileno():
            message, descriptors, _, _ = socket.recv_fds(connection, LARGEST_MESSAGE, 1)
            if not message:
                break
            self._reap()
            uid = int(message)
            with socket.socket(fileno=descriptors[0]) as control:
                try:
                    pid = self._start_worker(connection, control, uid)
                    control.send(json.dumps({"pid": pid}).encode())
                except OSError as error:
                    control.send(json.dumps({"problem": str(error)}).encode())
        self._reap(options=0)
        if self._group:
            self._group.remove()
        if self._setup.scratch:
            shutil.rmtree(self._setup.scratch, ignore_errors=True)

    def _start_worker(self, connection: socket.socket, control: socket.socket, uid: int) -> int:
        self._count += 1
        group = self._group.child(str(self._count)) if self._group else None
        namespaces = 0
        if self._setup.level >= Level.ISOLATED:
            namespaces = kernel.NEW_PIDS | kernel.NEW_MOUNTS
            namespaces |= kernel.NEW_USER if self._setup.user_namespace else 0
        pid = kernel.fork(namespaces)
        if pid:
            self._workers[pid] = group
            return pid
        connection.close()
        try:
            if namespaces & kernel.NEW_USER:
                kernel.map_user(self._proc, uid, 0, 0)
            os.close(self._proc)
            setup = WorkerSetup(
                zygote=self._setup, client=self._client, uid=uid, group=group, base_memory=self._base_memory
            )
            Worker(setup, control).serve()
        except Exception as error:  # noqa: BLE001 - named boundary: the client learns why the worker ended
            control.send(json.dumps({"problem": f"{type(error).__name__}: {error}"}).encode())
        finally:
            os._exit(0)

    def _reap(self, options: int = os.WNOHANG) -> None:
        """Collect workers that have ended and remove their control groups."""
        for pid in list(self._workers):
            if os.waitpid(pid, options)[0]:
                group = self._workers.pop(pid)
                if group:
                    os.close(group.directory)
                    group.remove()


def _own_memory(proc: int) -> int:
    """Return the bytes of address space that this process has."""
    descriptor = os.open("self/statm", os.O_RDONLY, dir_fd=proc)
    try:
        return int(os.read(descriptor, 100).split()[0]) * resource.getpagesize()
    finally:
        os.close(descriptor)
