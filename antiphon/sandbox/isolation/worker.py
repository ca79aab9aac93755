"""The worker process: runs one program after another, and kills everything that a program started.

It runs in a confined process: it imports the standard library and modules of this directory that do the same.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import tempfile
import time
from typing import Any

from antiphon.sandbox.base import Level, Limits
from antiphon.sandbox.isolation import kernel
from antiphon.sandbox.isolation.program import ProgramProcess
from antiphon.sandbox.isolation.protocol import LARGEST_MESSAGE, WORK, WorkerSetup, wait_readable


class Worker:
    """Runs programs, each until none of its processes is left."""

    def __init__(self, setup: WorkerSetup, control: socket.socket) -> None:
        self._setup = setup
        self._level = setup.zygote.level
        self._control = control
        self._exits: dict[int, tuple[int, resource.struct_rusage]] = {}
        self._memory_limit = 0  # of the control group
        self._kills = 0  # because of that limit, as last read

    def serve(self) -> None:
        """Run a program for each message, which carries the limits and the program's descriptors."""
        if self._level < Level.ISOLATED:
            kernel.become_subreaper()
        while wait_readable([self._control.fileno(), self._setup.client]) == self._control.fileno():
            message, descriptors, _, _ = socket.recv_fds(self._control, LARGEST_MESSAGE, 6)
            if not message:
                return
            if descriptors:  # a message without descriptors asks to stop a program that has ended meanwhile
                report = self._run(Limits(**json.loads(message)), descriptors)
                self._control.send(json.dumps(report).encode())

    def _run(self, limits: Limits, descriptors: list[int]) -> dict[str, Any]:
        """Run one program and return a report of how it ended."""
        directory = self._open_directory(limits)
        if self._setup.group and limits.memory != self._memory_limit:
            self._setup.group.limit_memory(limits.memory)
            self._memory_limit = limits.memory
        problem_reader, problem_writer = os.pipe()
        rules = [self._landlock_rules(directory)] if self._level >= Level.CONFINED else []
        began = time.monotonic()
        pid = os.fork()
        if not pid:
            ProgramProcess(self._setup, limits, directory, descriptors, rules, problem_writer).run()
        for descriptor in (problem_writer, *rules, *descriptors):
            os.close(descriptor)
        cause = self._wait_for_end(pid, limits.seconds)
        seconds = time.monotonic() - began
        status, usage = self._end_all(pid)
        self._close_directory(directory)
        with open(problem_reader, "rb") as pipe:
            problem = pipe.read().decode()
        return {
            "cause": cause,
            "problem": problem,
            "code": os.waitstatus_to_exitcode(status),
            "seconds": seconds,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_memory": usage.ru_maxrss << 10,
            "memory_kills": self._count_memory_kills(),
        }

    def _count_memory_kills(self) -> int:
        """Return how many processes the kernel has killed for the group's memory since the last call."""
        before, self._kills = self._kills, self._setup.group.kills() if self._setup.group else 0
        return self._kills - before

    def _open_directory(self, limits: Limits) -> str:
        if self._level >= Level.ISOLATED:
            kernel.mount_scratch("/tmp", limits.disk, self._setup.uid)
            return WORK
        directory = tempfile.mkdtemp(dir=self._setup.zygote.scratch)
        if self._setup.zygote.changes_user:
            os.chown(directory, self._setup.uid, self._setup.uid)
        return directory

    def _landlock_rules(self, directory: str) -> int:
        """Return the rules for the program's files. Made before the fork, so that no page is copied for them."""
        if self._level >= Level.ISOLATED:
            readable, writable = ["/"], ["/tmp"]
        else:
            readable, writable = self._setup.zygote.readable, [directory]
        devices = [f"/dev/{name}" for name in kernel.DEVICES]
        return kernel.make_landlock_rules(
            [path for path in readable if not os.path.islink(path)], [*writable, *devices]
        )

    def _close_directory(self, directory: str) -> None:
        if self._level >= Level.ISOLATED:
            kernel.unmount("/tmp")
        else:
            _remove_tree(directory)

    def _wait_for_end(self, pid: int, seconds: float) -> str:
        """Wait for a program and return `ended`, `deadline` (its time is over) or `stopped` (the client wants no result)."""
        program = os.pidfd_open(pid)
        try:
            ready = wait_readable([program, self._control.fileno(), self._setup.client], seconds)
        finally:
            os.close(program)
        if ready == self._control.fileno():
            self._control.recv(LARGEST_MESSAGE)
        return "deadline" if ready is None else "ended" if ready == program else "stopped"

    def _end_all(self, program: int) -> tuple[int, resource.struct_rusage]:
        """Kill everything that the program started, wait for it, and return the program's own exit status and usage."""
        while True:
            self._kill_all()
            try:
                pid, status, usage = os.wait4(-1, 0)
            except ChildProcessError:
                return self._exits.pop(program)
            if pid == program:
                self._exits[pid] = status, usage

    def _kill_all(self) -> None:
        everything_in_namespace = [-1]
        for pid in everything_in_namespace if self._level >= Level.ISOLATED else _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants of `pid`."""
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(child) for child in file.read().split()]
    except OSError:  # the process has ended meanwhile
        return found
    return [*found, *(grandchild for child in found for grandchild in _descendants(child))]


def _remove_tree(directory: str) -> None:
    """Remove a directory, however deep a program made it and whatever permissions it set."""
    remove = ["rm", "-rf", "--", directory]
    if subprocess.run(remove, stderr=subprocess.DEVNULL, check=False).returncode:
        subprocess.run(["chmod", "-R", "u+rwX", "--", directory], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(remove, check=True)
