"""The processes of the forked backend, below the one that asks. They import the standard library and their neighbours here.

    zygote    one; started clean, it enters the private root and forks workers when it is asked to
    worker    one for each program at a time; first process of its process namespace, runs programs one after another
    program   one a run: forked by the worker, it gives up every right and becomes the program

Only the program runs what is not ours, and it never goes back: how it ended is what the kernel tells its worker. The worker
reads nothing that a program wrote, nor the programs themselves: those go from the asking process to the program's process in
a file in memory.

Messages are JSON in packets on Unix sockets, with descriptors beside them. The zygote and the workers end when their socket
is closed or the process that asks is gone.
"""

import contextlib
import fcntl
import gc
import json
import marshal
import math
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from antiphon.sandbox.base import Level, Limits
from antiphon.sandbox.isolation import cgroups, kernel, seccomp, users
from antiphon.sandbox.isolation.execution import execute

WORK = "/tmp/work"  # of a program in the private root
PACKAGES = "/packages"
OPEN_FILES = 256
FIRST_LINK = 3  # after the standard streams
LARGEST_MESSAGE = 1 << 16

# What most programs import; each costs every fork the time to copy its pages.
_USUAL = """
    abc bisect collections contextlib copy dataclasses datetime decimal enum fractions functools hashlib heapq io itertools json
    math operator random re statistics string textwrap threading time traceback typing
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the zygote must know."""

    level: Level
    user_namespace: bool
    """Whether the rights to make the other namespaces must come from one of users."""
    seccomp: bool
    """Whether system calls can be filtered; from level 2 on they must be."""
    asking: int
    """Process whose end ends all."""
    sources: dict[str, str]
    """What programs may read: path as they see it at level 3 -> path here."""
    imports: tuple[str, ...]
    """Packages that are imported once, for all programs."""
    paths: tuple[str, ...]
    """Directories that are put at the end of `sys.path`."""
    scratch: str
    """Directory below which programs work at levels 1 and 2; at level 3 there is none."""


def main(descriptor: int, modules: int) -> None:
    """Serve the process on the other side of the socket until it closes it. `modules`: descriptor of a file with the names of
    modules and their compiled code, marshalled, which programs find imported."""
    connection = socket.socket(fileno=descriptor)
    setup = Setup(**json.loads(connection.recv(LARGEST_MESSAGE)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        zygote = _Zygote(setup, modules)
    except (OSError, ImportError) as error:
        connection.send(json.dumps({"problem": str(error)}).encode())
        return
    connection.send(json.dumps({"group": str(zygote.group_path or "")}).encode())
    zygote.serve(connection)


# --- the zygote ------------------------------------------------------------------------------------------------------------


class _Zygote:
    """Forks workers, and clears up behind them."""

    def __init__(self, setup: Setup, modules: int) -> None:
        self._setup = setup
        self._asking = os.pidfd_open(setup.asking)
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self._group: cgroups.Group | None = None
        self.group_path: Path | None = None
        self._workers: dict[int, cgroups.Group | None] = {}  # by process id
        self._count = 0
        with contextlib.suppress(OSError):  # then memory is bounded for each process alone
            self._group, self.group_path = cgroups.make_group(f"antiphon-{os.getpid()}")
        if setup.level >= Level.ISOLATED:
            self._isolate()
        sys.path.extend(setup.paths)
        for name in (*_USUAL.split(), *setup.imports):
            __import__(name)
        with open(modules, "rb") as file:
            given = {name: (types.ModuleType(name), code) for name, code in marshal.load(file).items()}
        for module, code in given.values():
            sys.modules[module.__name__] = module
            exec(code, vars(module))
        if setup.level >= Level.CONFINED:
            _filter(setup)  # made once, here
        ours = [name for name in sys.modules if name.partition(".")[0] == "antiphon" and name not in given]
        self._ours = {name: sys.modules.pop(name) for name in ours}
        self._base_memory = _own_memory(self._proc)
        gc.collect()
        gc.freeze()  # what is here already is not written to by a collection in a program, and so not copied

    def _isolate(self) -> None:
        namespaces = kernel.NEW_MOUNTS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_UTS | kernel.NEW_CGROUP
        uid, gid = os.getuid(), os.getgid()
        if self._setup.user_namespace:
            kernel.unshare(namespaces | kernel.NEW_USER)
            kernel.map_user(self._proc, 0, uid, gid)
        else:
            kernel.unshare(namespaces)
        kernel.enter_root(self._setup.sources)

    def serve(self, connection: socket.socket) -> None:
        while _wait([connection.fileno(), self._asking]) == connection.fileno():
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
        self._reap(how=0)
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
            worker = _Worker(
                setup=self._setup,
                control=control,
                asking=self._asking,
                uid=uid,
                group=group,
                base_memory=self._base_memory,
            )
            worker.serve()
        except Exception as error:  # noqa: BLE001 - named boundary: who waits for the worker learns why it ended
            control.send(json.dumps({"problem": f"{type(error).__name__}: {error}"}).encode())
        finally:
            os._exit(0)

    def _reap(self, how: int = os.WNOHANG) -> None:
        """Clear up behind the workers that have ended."""
        for pid in list(self._workers):
            if os.waitpid(pid, how)[0]:
                group = self._workers.pop(pid)
                if group:
                    os.close(group.directory)
                    group.remove()


def _own_memory(proc: int) -> int:
    """Bytes of address space that this process has."""
    descriptor = os.open("self/statm", os.O_RDONLY, dir_fd=proc)
    try:
        return int(os.read(descriptor, 100).split()[0]) * resource.getpagesize()
    finally:
        os.close(descriptor)


def _wait(descriptors: list[int], seconds: float | None = None) -> int | None:
    """The first of the descriptors that has something to read; None when the time is over."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(None if seconds is None else max(0.0, seconds) * 1000)}
    return next((descriptor for descriptor in descriptors if descriptor in ready), None)


# --- the worker ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Worker:
    """Runs one program after another, each until nothing of it is left."""

    setup: Setup
    control: socket.socket
    asking: int
    uid: int
    group: cgroups.Group | None
    base_memory: int
    _ends: dict[int, tuple[int, resource.struct_rusage]] = field(default_factory=dict)
    _bound: int = 0  # of the group's memory
    _kills: int = 0  # for it, so far

    def serve(self) -> None:
        if self.setup.level < Level.ISOLATED:
            kernel.become_subreaper()
        while _wait([self.control.fileno(), self.asking]) == self.control.fileno():
            message, descriptors, _, _ = socket.recv_fds(self.control, LARGEST_MESSAGE, 6)
            if not message:
                return
            if descriptors:  # else it asks to stop what has ended by now
                report = self._run(Limits(**json.loads(message)), descriptors)
                self.control.send(json.dumps(report).encode())

    def _run(self, limits: Limits, descriptors: list[int]) -> dict[str, Any]:
        """Run one program; say how it ended."""
        directory = self._open_directory(limits)
        if self.group and limits.memory != self._bound:
            self.group.limit_memory(limits.memory)
            self._bound = limits.memory
        problems, problem = os.pipe()
        rules = [self._rules(directory)] if self.setup.level >= Level.CONFINED else []
        began = time.monotonic()
        pid = os.fork()
        if not pid:
            _Program(self, limits, directory, descriptors, rules, problem).run()
        for descriptor in (problem, *rules, *descriptors):
            os.close(descriptor)
        cause = self._await_end(pid, limits.seconds)
        seconds = time.monotonic() - began
        status, usage = self._end_all(pid)
        self._close_directory(directory)
        with open(problems, "rb") as pipe:
            text = pipe.read().decode()
        return {
            "cause": cause,
            "problem": text,
            "code": os.waitstatus_to_exitcode(status),
            "seconds": seconds,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_memory": usage.ru_maxrss << 10,
            "memory_kills": self._memory_kills(),
        }

    def _memory_kills(self) -> int:
        """How many have been killed for the group's memory since it was asked last."""
        before, self._kills = self._kills, self.group.kills() if self.group else 0
        return self._kills - before

    def _open_directory(self, limits: Limits) -> str:
        if self.setup.level >= Level.ISOLATED:
            kernel.mount_scratch("/tmp", limits.disk, self.uid)
            return WORK
        directory = tempfile.mkdtemp(dir=self.setup.scratch)
        if self.changes_user:
            os.chown(directory, self.uid, self.uid)
        return directory

    def _rules(self, directory: str) -> int:
        """No file but those for programs can be opened; made here, where nothing has to be copied for it."""
        if self.setup.level >= Level.ISOLATED:
            readable, writable = ["/"], ["/tmp"]
        else:
            readable, writable = self.readable, [directory]
        devices = [f"/dev/{name}" for name in kernel.DEVICES]
        return kernel.file_rules([path for path in readable if not os.path.islink(path)], [*writable, *devices])

    @property
    def readable(self) -> list[str]:
        """What programs may read, as it is seen here below level 3."""
        return list(self.setup.sources.values())

    def _close_directory(self, directory: str) -> None:
        if self.setup.level >= Level.ISOLATED:
            kernel.unmount("/tmp")
        else:
            _remove(directory)

    @property
    def changes_user(self) -> bool:
        """Whether programs have a user of their own: from level 2 on, where root gives them one."""
        return self.setup.level >= Level.CONFINED and os.getuid() == 0

    def _await_end(self, pid: int, seconds: float) -> str:
        """Wait for the program: whether it `ended`, its time is over (`deadline`), or nobody wants it any more (`stopped`)."""
        program = os.pidfd_open(pid)
        try:
            ready = _wait([program, self.control.fileno(), self.asking], seconds)
        finally:
            os.close(program)
        if ready == self.control.fileno():
            self.control.recv(LARGEST_MESSAGE)
        return "deadline" if ready is None else "ended" if ready == program else "stopped"

    def _end_all(self, program: int) -> tuple[int, resource.struct_rusage]:
        """Kill all that the program started, and wait until it is gone; the program's own end."""
        while True:
            self._kill_all()
            try:
                pid, status, usage = os.wait4(-1, 0)
            except ChildProcessError:
                return self._ends.pop(program)
            if pid == program:
                self._ends[pid] = status, usage

    def _kill_all(self) -> None:
        everyone_else = [-1]
        for pid in everyone_else if self.setup.level >= Level.ISOLATED else _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _descendants(pid: int) -> list[int]:
    """Process ids of all that `pid` started and of what those started."""
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(child) for child in file.read().split()]
    except OSError:  # it has ended meanwhile
        return found
    return [*found, *(grandchild for child in found for grandchild in _descendants(child))]


def _remove(directory: str) -> None:
    """Remove a directory, however deep the program made it and whatever it made of its permissions."""
    subprocess.run(["chmod", "-R", "u+rwX", "--", directory], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["rm", "-rf", "--", directory], check=True)


# --- the program -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Program:
    """The process that gives up its rights and becomes the program."""

    worker: _Worker
    limits: Limits
    directory: str
    descriptors: list[int]
    rules: list[int]  # for files, if they are restricted
    problem: int
    links: list[int] = field(default_factory=list)  # to another program

    def run(self) -> NoReturn:
        try:
            program = self._prepare()
        except BaseException as error:  # noqa: BLE001 - named boundary: whatever it is, the program must not run
            os.write(self.problem, f"{type(error).__name__}: {error}".encode()[:4000])
            os._exit(1)
        for number, descriptor in enumerate(self.links, FIRST_LINK):
            os.dup2(descriptor, number)
        kernel.close_from(FIRST_LINK + len(self.links))
        execute(program)

    def _prepare(self) -> str:
        payload, *streams = self.descriptors
        with open(payload, "rb") as file:
            program, files = marshal.load(file)
        os.setsid()
        for number, descriptor in enumerate(streams[:FIRST_LINK]):
            os.dup2(descriptor, number)
        # Their numbers may still be those of descriptors that are needed up to the end.
        self.links = [fcntl.fcntl(each, fcntl.F_DUPFD, OPEN_FILES // 2) for each in streams[FIRST_LINK:]]
        if self.worker.group:
            self.worker.group.join()
        if self.worker.setup.level >= Level.CONFINED:
            self._confine()
        if self.worker.setup.level >= Level.ISOLATED:
            os.mkdir("/tmp/shm")
            os.mkdir(self.directory)
        os.chdir(self.directory)
        for name, content in files.items():
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        kernel.limit(self._limits())
        resource.setrlimit(
            resource.RLIMIT_CPU, (math.ceil(self.limits.cpu_seconds), resource.getrlimit(resource.RLIMIT_CPU)[1])
        )
        if self.worker.setup.seccomp or self.worker.setup.level >= Level.CONFINED:
            kernel.forbid_privileges()
            seccomp.install(_filter(self.worker.setup))
        return str(program)

    def _confine(self) -> None:
        """From here on no file but those for programs can be opened, and there are no rights but a user's."""
        kernel.forbid_privileges()
        for rules in self.rules:
            kernel.restrict(rules)
        if self.worker.changes_user:
            hidden = self.worker.setup.level < Level.ISOLATED and users.hidden(self.worker.readable)
            kernel.change_user(self.worker.uid, keep=(kernel.READ_SEARCH,) if hidden else ())
        else:
            kernel.keep_capabilities()

    def _limits(self) -> dict[int, int]:
        limits, worker = self.limits, self.worker
        values = {
            resource.RLIMIT_AS: worker.base_memory + limits.memory,
            resource.RLIMIT_CPU: math.ceil(limits.cpu_seconds) + 1,
            resource.RLIMIT_FSIZE: limits.file_size,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
        }
        if worker.changes_user:
            values[resource.RLIMIT_NPROC] = limits.processes
        elif worker.setup.level >= Level.ISOLATED:
            values[resource.RLIMIT_NPROC] = limits.processes + 1  # the worker counts too
        elif os.getuid():
            values[resource.RLIMIT_NPROC] = limits.processes + _threads_of(os.getuid())
        return values


def _filter(setup: Setup) -> bytes:
    """Landlock knows nothing of permissions: where a program has the user's own files around it, none may be changed."""
    if setup.level < Level.CONFINED:
        return seccomp.shared_program()
    return seccomp.filter_program(keep_attributes=setup.level == Level.CONFINED and os.getuid() != 0)


def _threads_of(uid: int) -> int:
    """How many threads the user has on this machine."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            count += len(os.listdir(process / "task")) if process.stat().st_uid == uid else 0
        except OSError:
            continue
    return count
