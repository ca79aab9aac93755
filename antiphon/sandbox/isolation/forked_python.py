"""Python programs in forked processes: the fast backend, for rewards that run code.

A zygote has Python and the usual modules ready, so starting a program costs one fork and its isolation (`zygote`).
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from types import CodeType, MappingProxyType

from typing_extensions import override

from antiphon.core.errors import UnsupportedError
from antiphon.sandbox.base import Level, Limits, PythonSandbox, Result, Status, linked_limits
from antiphon.sandbox.config import SandboxConfig
from antiphon.sandbox.isolation import kernel, levels
from antiphon.sandbox.isolation.memory_files import memory_file, payload_file
from antiphon.sandbox.isolation.outputs import OutputPipes, make_result
from antiphon.sandbox.isolation.packages import locate_packages
from antiphon.sandbox.isolation.zygote_client import LostError, WorkerClient, ZygoteClient, receive_answer

MAX_IDLE_WORKERS = 16


class ForkedPython(PythonSandbox):
    """A `PythonSandbox` of pre-forked processes. A worker or zygote that dies is replaced."""

    def __init__(
        self,
        config: SandboxConfig | None = None,
        *,
        level: Level | None = None,
        modules: Mapping[str, CodeType] = MappingProxyType({}),
    ) -> None:
        """Start the zygote.

        Args:
            config: Minimum level, packages and limits.
            level: Run at exactly this level, without checking the machine; for tests.
            modules: Code objects by the module name under which programs find them imported. A module that another one
                imports comes before it.

        Raises:
            UnsupportedError: This machine cannot give the minimum level.
        """
        config = config or SandboxConfig()
        self._modules = modules
        self.level = level or levels.require_level(config.minimum_level)
        if self.level < Level.CONFINED:
            kernel.make_opaque()  # programs have this process's user, and it holds the pipes of all
        self._limits = config.limits.limits
        self._packages = locate_packages(config.packages)
        self._lock = threading.Lock()
        self._idle: list[WorkerClient] = []
        self._busy: set[WorkerClient] = set()
        self._zygote: ZygoteClient | None = None
        self._closed = False
        with self._lock:
            self._zygote = self._start_zygote()

    @override
    def run(
        self, program: str, *, stdin: str = "", files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> Result:
        """Run `program` as `__main__` in a forked process.

        Raises:
            ValueError: A file lies outside the working directory.
        """
        contents = {_check_relative(name): content for name, content in (files or {}).items()}
        with payload_file(program, contents) as payload:
            return self._run_payload(payload.fileno(), stdin, limits or self._limits)

    @override
    def run_linked(self, judge: str, partner: str, *, stdin: str = "", limits: Limits | None = None) -> Result:
        """Run two programs in separate workers, linked by pipes."""
        judge_limits, partner_limits = linked_limits(limits or self._limits)
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
                worker = self._start_program(partner_limits, [payloads[1], partner_reads, partner_writes, null])
            except LostError as error:
                return self._refuse(str(error))
            judge_links = [judge_reads, judge_writes]
            result = self._run_payload(payloads[0], stdin, judge_limits, judge_links, on_started=close_links)
            close_links()
            problem = self._stop_program(worker)
        return self._refuse(problem) if problem else result

    def _run_payload(
        self,
        payload: int,
        stdin: str,
        limits: Limits,
        links: Sequence[int] = (),
        on_started: Callable[[], object] = lambda: None,
    ) -> Result:
        """Run the program in a payload file to its end; call `on_started` once it has its descriptors."""
        outputs = OutputPipes()
        try:
            with memory_file(stdin.encode("utf-8", "surrogatepass")) as standard_input:
                descriptors = [payload, standard_input.fileno(), *outputs.write_ends, *links]
                worker = self._start_program(limits, descriptors)
        except LostError as error:
            outputs.close()
            return self._refuse(str(error))
        on_started()
        outputs.close_write_ends()
        try:
            report, stdout, stderr = outputs.collect(worker, limits)
        except LostError as error:
            self._drop(worker)
            return self._refuse(str(error))
        finally:
            outputs.close()
        self._release(worker)
        return make_result(report, stdout, stderr, limits, self.level)

    def _stop_program(self, worker: WorkerClient) -> str:
        """Stop what a worker runs; return why it could not run it, or an empty string."""
        try:
            with contextlib.suppress(OSError):
                worker.control.send(b"stop")
            report = receive_answer(worker.control, "the worker")
        except LostError as error:
            self._drop(worker)
            return str(error)
        self._release(worker)
        return f"the program could not be started: {report['problem']}" if report["problem"] else ""

    @override
    def close(self) -> None:
        """End all programs and processes. A second call does nothing."""
        with self._lock:
            self._closed = True
            for worker in self._busy:  # the thread that waits for a worker closes it
                worker.control.shutdown(socket.SHUT_RDWR)
            while self._idle:
                self._idle.pop().close()
            if self._zygote:
                self._zygote.close()
                self._zygote = None

    def processes(self) -> list[int]:
        """Return the process ids of the zygote and its workers, the zygote first."""
        with self._lock:
            zygotes = [self._zygote.process.pid] if self._zygote else []
            return [*zygotes, *(worker.pid for worker in [*self._idle, *self._busy])]

    # --- workers ----------------------------------------------------------------------------------------------------------

    def _start_program(self, limits: Limits, descriptors: list[int]) -> WorkerClient:
        """Have a worker start a program. A worker or zygote that had died is replaced without an error.

        Args:
            limits: What the program may use.
            descriptors: The payload, the three standard streams, and links to another program.

        Raises:
            LostError: A new worker died as well.
        """
        message = json.dumps(asdict(limits)).encode()
        while True:
            worker, is_new = self._acquire()
            try:
                socket.send_fds(worker.control, [message], descriptors)
            except OSError as error:
                self._drop(worker)
                if is_new:
                    raise LostError(f"a new worker died: {error}") from error
                continue
            return worker

    def _acquire(self) -> tuple[WorkerClient, bool]:
        """Return an idle worker or a new one, and whether it is new."""
        with self._lock:
            if self._closed:
                raise LostError("the sandbox is closed")
            is_new = not self._idle
            worker = self._start_worker() if is_new else self._idle.pop()
            self._busy.add(worker)
            return worker, is_new

    def _start_worker(self) -> WorkerClient:
        if self._zygote:
            try:
                return self._zygote.start_worker()
            except LostError:
                self._zygote.close()
                self._zygote = None
        try:
            self._zygote = self._start_zygote()
        except UnsupportedError as error:
            raise LostError(str(error)) from error
        return self._zygote.start_worker()

    def _start_zygote(self) -> ZygoteClient:
        return ZygoteClient(self.level, self._packages, self._modules)

    def _release(self, worker: WorkerClient) -> None:
        with self._lock:
            self._busy.discard(worker)
            if self._closed or len(self._idle) >= MAX_IDLE_WORKERS:
                worker.close()
            else:
                self._idle.append(worker)

    def _drop(self, worker: WorkerClient) -> None:
        with self._lock:
            self._busy.discard(worker)
            worker.kill()

    def _refuse(self, detail: str) -> Result:
        return Result(status=Status.REFUSED, level=self.level, detail=detail)


def _check_relative(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"file {name!r}: expected a path relative to the working directory, without '..'")
    return name
