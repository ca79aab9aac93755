"""Python programs in forked processes: the fast backend, for rewards that run code.

A zygote has Python and the usual modules ready; a program costs a fork of it and what keeps it apart (see `zygote`).
"""

import contextlib
import importlib.metadata
import json
import marshal
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from types import CodeType, MappingProxyType
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.sandbox.base import Level, Limits, PythonSandbox, Result, Status, Usage, linked_limits
from antiphon.sandbox.config import SandboxConfig
from antiphon.sandbox.isolation import cgroups, levels, users, zygote
from antiphon.sandbox.isolation.memory_files import memory_file, payload_file

START_SECONDS = 60.0  # a loaded machine, and packages that are slow to import
GRACE_SECONDS = 30.0  # beyond a program's own time, after which its worker is taken for lost
MOST_IDLE = 16
_ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class _Lost(Exception):
    """A worker or the zygote is gone, or did not answer."""


class ForkedPython(PythonSandbox):
    """A `PythonSandbox` of pre-forked processes.

    `level` is for tests, which want less than there is. `modules`: compiled code by the name under which programs find it
    imported, of those that need one another the needed first. `UnsupportedError` if this machine cannot give the minimum.
    """

    def __init__(
        self,
        config: SandboxConfig | None = None,
        *,
        level: Level | None = None,
        modules: Mapping[str, CodeType] = MappingProxyType({}),
    ) -> None:
        config = config or SandboxConfig()
        self._modules = modules
        self.level = level or levels.require_level(config.minimum_level)
        self._limits = config.limits.limits
        self._packages = locate(config.packages)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._zygote: _Zygote | None = None
        self._closed = False
        with self._lock:
            self._zygote = self._start_zygote()

    def run(
        self, program: str, *, stdin: str = "", files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> Result:
        """Run `program` as `__main__`; see `PythonSandbox`. `ValueError` for a file outside the working directory."""
        contents = {_inside(name): content for name, content in (files or {}).items()}
        with payload_file(program, contents) as payload:
            return self._see_through(payload.fileno(), stdin, limits or self._limits)

    def run_linked(self, judge: str, partner: str, *, stdin: str = "", limits: Limits | None = None) -> Result:
        """Run two programs of separate workers, linked by pipes; see `PythonSandbox`."""
        ours, theirs = linked_limits(limits or self._limits)
        with contextlib.ExitStack() as stack:
            payloads = [stack.enter_context(payload_file(program, {})).fileno() for program in (judge, partner)]
            null = stack.enter_context(open(os.devnull, "wb")).fileno()
            partner_reads, judge_writes = os.pipe()
            judge_reads, partner_writes = os.pipe()
            links = [partner_reads, judge_writes, judge_reads, partner_writes]

            def close_links() -> None:
                while links:
                    os.close(links.pop())

            stack.callback(close_links)
            try:
                worker = self._begin(theirs, [payloads[1], partner_reads, partner_writes, null])
            except _Lost as error:
                return self._refuse(str(error))
            result = self._see_through(payloads[0], stdin, ours, [judge_reads, judge_writes], begun=close_links)
            close_links()
            problem = self._stop(worker)
        return self._refuse(problem) if problem else result

    def _see_through(
        self,
        payload: int,
        stdin: str,
        limits: Limits,
        links: Sequence[int] = (),
        begun: Callable[[], object] = lambda: None,
    ) -> Result:
        """Run the program of `payload` to its end; `begun` is called when it has its descriptors."""
        outputs = _Outputs()
        try:
            with memory_file(stdin.encode("utf-8", "surrogatepass")) as typed:
                worker = self._begin(limits, [payload, typed.fileno(), *outputs.write_ends, *links])
        except _Lost as error:
            outputs.close()
            return self._refuse(str(error))
        begun()
        outputs.close_write_ends()
        try:
            report, stdout, stderr = outputs.collect(worker, limits)
        except _Lost as error:
            self._drop(worker)
            return self._refuse(str(error))
        finally:
            outputs.close()
        self._give_back(worker)
        return self._result(report, stdout, stderr, limits)

    def _stop(self, worker: "_Worker") -> str:
        """End what a worker runs; why it could not run it, or nothing."""
        try:
            with contextlib.suppress(OSError):
                worker.control.send(b"stop")
            report = _answer(worker.control, "the worker")
        except _Lost as error:
            self._drop(worker)
            return str(error)
        self._give_back(worker)
        return f"the program could not be started: {report['problem']}" if report["problem"] else ""

    def close(self) -> None:
        """End whatever runs. Twice is once."""
        with self._lock:
            self._closed = True
            for worker in self._busy:  # who waits for it closes it
                worker.control.shutdown(socket.SHUT_RDWR)
            while self._idle:
                self._idle.pop().close()
            if self._zygote:
                self._zygote.close()
                self._zygote = None

    def processes(self) -> list[int]:
        """Process ids of the zygote and its workers, the zygote first."""
        with self._lock:
            zygotes = [self._zygote.process.pid] if self._zygote else []
            return [*zygotes, *(worker.pid for worker in [*self._idle, *self._busy])]

    # --- workers ----------------------------------------------------------------------------------------------------------

    def _begin(self, limits: Limits, descriptors: list[int]) -> "_Worker":
        """Have a worker start a program; `descriptors`: its payload, its three streams, and links to another program. A worker
        or zygote that had died before costs nothing but a new one."""
        message = json.dumps(asdict(limits)).encode()
        while True:
            worker, fresh = self._take()
            try:
                socket.send_fds(worker.control, [message], descriptors)
            except OSError as error:
                self._drop(worker)
                if fresh:
                    raise _Lost(f"a new worker died: {error}") from error
                continue
            return worker

    def _take(self) -> "tuple[_Worker, bool]":
        """An idle worker, or a new one, and whether it is new."""
        with self._lock:
            if self._closed:
                raise _Lost("the sandbox is closed")
            fresh = not self._idle
            worker = self._start_worker() if fresh else self._idle.pop()
            self._busy.add(worker)
            return worker, fresh

    def _start_worker(self) -> "_Worker":
        if self._zygote:
            try:
                return self._zygote.start_worker()
            except _Lost:
                self._zygote.close()
                self._zygote = None
        try:
            self._zygote = self._start_zygote()
        except UnsupportedError as error:
            raise _Lost(str(error)) from error
        return self._zygote.start_worker()

    def _start_zygote(self) -> "_Zygote":
        return _Zygote(self.level, self._packages, self._modules)

    def _give_back(self, worker: "_Worker") -> None:
        with self._lock:
            self._busy.discard(worker)
            if self._closed or len(self._idle) >= MOST_IDLE:
                worker.close()
            else:
                self._idle.append(worker)

    def _drop(self, worker: "_Worker") -> None:
        with self._lock:
            self._busy.discard(worker)
            worker.kill()

    # --- results ----------------------------------------------------------------------------------------------------------

    def _refuse(self, detail: str) -> Result:
        return Result(status=Status.REFUSED, level=self.level, detail=detail)

    def _result(self, report: dict[str, Any], stdout: bytes, stderr: bytes, limits: Limits) -> Result:
        if report["problem"]:
            return self._refuse(f"the program could not be started: {report['problem']}")
        out, err = (text[: limits.output].decode("utf-8", "replace") for text in (stdout, stderr))
        too_long = max(len(stdout), len(stderr)) > limits.output
        status, detail = _verdict(report, limits, too_long, err)
        return Result(
            status=status,
            level=self.level,
            exit_code=report["code"] if status in _BY_ITSELF and report["code"] >= 0 else None,
            stdout=out,
            stderr=err,
            usage=Usage(
                seconds=report["seconds"], cpu_seconds=report["cpu_seconds"], peak_memory=report["peak_memory"]
            ),
            detail=detail,
        )


_BY_ITSELF = (Status.OK, Status.ERROR, Status.MEMORY)


def _verdict(report: Mapping[str, Any], limits: Limits, too_long: bool, stderr: str) -> tuple[Status, str]:
    """How the program ended, from what the kernel said of it."""
    code = report["code"]
    if too_long:
        return Status.OUTPUT_LIMIT, f"more than {limits.output} bytes"
    if report["cause"] == "deadline":
        return Status.TIMEOUT, f"after {limits.seconds:g} s"
    if report["cause"] == "stopped":
        return Status.REFUSED, "stopped"
    if code == 0:
        return Status.OK, ""
    if report["memory_kills"]:
        return Status.MEMORY, f"more than {limits.memory} bytes in all its processes"
    if code > 0:
        out_of_memory = code == 1 and stderr.rstrip().rpartition("\n")[2].partition(":")[0] == "MemoryError"
        return (Status.MEMORY, "MemoryError") if out_of_memory else (Status.ERROR, f"exit code {code}")
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    if -code == signal.SIGXCPU or (-code == signal.SIGKILL and report["cpu_seconds"] >= limits.cpu_seconds):
        return Status.TIMEOUT, f"after {limits.cpu_seconds:g} s of processor time"
    return Status.KILLED, f"signal {name}"


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"file {name!r}: expected a path relative to the working directory, without '..'")
    return name


def locate(names: tuple[str, ...]) -> dict[str, str]:
    """The top-level files of installed distributions and of what they require: name -> path; `ConfigError` for one that is not
    installed."""
    found, left, seen = {}, list(names), set()
    while left:
        name = canonicalize_name(left.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError(f"sandbox.packages: {name!r} is not installed") from error
        for file in distribution.files or []:
            if file.parts[0] not in {"..", "__pycache__"}:
                found[file.parts[0]] = str(Path(str(distribution.locate_file(file.parts[0]))).resolve())
        needed = map(Requirement, distribution.requires or [])
        left += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


# --- the other processes, seen from here --------------------------------------------------------------------------------


class _Zygote:
    """The process that forks workers."""

    def __init__(self, level: Level, packages: Mapping[str, str], modules: Mapping[str, CodeType]) -> None:
        self._scratch = "" if level >= Level.ISOLATED else tempfile.mkdtemp(prefix="antiphon-sandbox-")
        if self._scratch:
            os.chmod(self._scratch, 0o711)  # programs with users of their own reach their directories below it
        self._group: Path | None = None
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(START_SECONDS)
        with theirs, memory_file(marshal.dumps(dict(modules))) as code:
            self.process = subprocess.Popen(
                levels.python_command("antiphon.sandbox.isolation.zygote", f"main({theirs.fileno()}, {code.fileno()})"),
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=[theirs.fileno(), code.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the asking process's to handle
            )
        try:
            self.connection.send(json.dumps(self._setup(level, packages)).encode())
            answer = _answer(self.connection, "the zygote")
        except (_Lost, OSError) as error:
            self.close()
            raise UnsupportedError(f"the sandbox does not start at level {level}: {error}") from error
        self._group = Path(answer["group"]) if answer["group"] else None

    def _setup(self, level: Level, packages: Mapping[str, str]) -> dict[str, Any]:
        isolated = level >= Level.ISOLATED
        inside = {f"{zygote.PACKAGES}/{name}" if isolated else path: path for name, path in packages.items()}
        return {
            "level": level,
            "user_namespace": levels.probe().user_namespace,
            "seccomp": levels.probe().seccomp,
            "asking": os.getpid(),
            "sources": levels.python_sources() | inside,
            "imports": [name for name in packages if (Path(packages[name]) / "__init__.py").exists()],
            "paths": [zygote.PACKAGES]
            if isolated and packages
            else sorted({str(Path(p).parent) for p in packages.values()}),
            "scratch": self._scratch,
        }

    def start_worker(self) -> "_Worker":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_SECONDS)
        with theirs:
            try:
                claim, uid = users.claim()
            except OSError as error:
                raise _Lost(str(error)) from None
            try:
                socket.send_fds(self.connection, [str(uid).encode()], [theirs.fileno()])
            except OSError as error:
                ours.close()
                claim.close()
                raise _Lost(f"the zygote is gone: {error}") from error
        try:
            return _Worker(ours, claim, _answer(ours, "a worker")["pid"])
        except _Lost:
            ours.close()
            claim.close()
            raise

    def close(self) -> None:
        """End it; its workers see that their sockets are closed."""
        self.connection.close()
        try:
            self.process.wait(5.0)  # it waits for the workers
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._group:
            cgroups.remove_group(self._group)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


class _Worker:
    """The process that runs programs, one at a time."""

    def __init__(self, control: socket.socket, claim: socket.socket, pid: int) -> None:
        self.control = control
        self._claim = claim
        self.pid = pid
        self._handle: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it is gone: the first message will tell
            self._handle = os.pidfd_open(pid)

    def close(self) -> None:
        """Have it kill what it runs, and end."""
        self.control.close()
        self._claim.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def kill(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        self.close()


def _answer(connection: socket.socket, whose: str) -> dict[str, Any]:
    """The next message; `_Lost` if there is none, or it tells of a problem."""
    try:
        message = connection.recv(zygote.LARGEST_MESSAGE)
    except OSError as error:
        raise _Lost(f"{whose} does not answer: {error}") from error
    if not message:
        raise _Lost(f"{whose} ended")
    answer: dict[str, Any] = json.loads(message)
    if "problem" in answer and len(answer) == 1:
        raise _Lost(f"{whose}: {answer['problem']}")
    return answer


@dataclass(slots=True)
class _Outputs:
    """What a program writes, read while it runs."""

    read_ends: list[int] = field(default_factory=list)
    write_ends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for _ in range(2):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self.read_ends.append(reader)
            self.write_ends.append(writer)

    def close_write_ends(self) -> None:
        while self.write_ends:
            os.close(self.write_ends.pop())

    def close(self) -> None:
        self.close_write_ends()
        while self.read_ends:
            os.close(self.read_ends.pop())

    def collect(self, worker: _Worker, limits: Limits) -> tuple[dict[str, Any], bytes, bytes]:
        """Read both streams until the worker reports the end; what it reports, and the streams. More than is kept of one
        ends the program."""
        kept = {descriptor: bytearray() for descriptor in self.read_ends}
        poll, control = select.poll(), worker.control.fileno()
        for descriptor in (*kept, control):
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + limits.seconds + GRACE_SECONDS
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)]
            if not ready:
                raise _Lost("the worker does not answer")
            over = False
            for descriptor in ready:
                if descriptor != control and not _read_on(descriptor, kept[descriptor], limits.output):
                    poll.unregister(descriptor)
                    over = over or len(kept[descriptor]) > limits.output
            if control in ready:
                report = _answer(worker.control, "the worker")
                for descriptor, content in kept.items():
                    while _read_on(descriptor, content, limits.output):
                        pass
                stdout, stderr = map(bytes, kept.values())
                return report, stdout, stderr
            if over:
                with contextlib.suppress(OSError):
                    worker.control.send(b"stop")


def _read_on(descriptor: int, kept: bytearray, most: int) -> bool:
    """Read what is there; whether to come back for more."""
    if len(kept) > most:
        return False
    try:
        content = os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return False
    kept += content
    return bool(content) and len(kept) <= most
