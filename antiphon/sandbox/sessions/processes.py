"""Finds and signals the processes of a sandbox from outside, without ever signalling another process.

A process number can be reused at any time. A process is therefore first held by a pidfd, then inspected, and only then
signalled. All information comes from the kernel, none from the sandbox.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process. All numbers are those inside the sandbox."""

    pid: int
    group: int
    session: int


class Processes:
    """The processes in the process namespace of one first process."""

    def __init__(self, first: int) -> None:
        """Attach to a namespace.

        Args:
            first: Number on this machine of the process that is number 1 inside.

        Raises:
            OSError: The process has ended.
        """
        self._first = first
        self._namespace = os.stat(f"/proc/{first}/ns/pid").st_ino
        self._outside: dict[int, int] = {}  # number inside -> number on this machine

    def signal(self, number: signal.Signals, wanted: Callable[[Process], bool]) -> None:
        """Send a signal to all processes that `wanted` accepts, except the first."""
        for pid in list(_descendants(self._first)):
            with suppress(OSError):  # it has ended
                held = os.pidfd_open(pid)
                try:
                    process = _inspect(pid)
                    if os.stat(f"/proc/{pid}/ns/pid").st_ino == self._namespace and wanted(process):
                        signal.pidfd_send_signal(held, number)
                finally:
                    os.close(held)

    def cpu_seconds(self, number: int) -> float:
        """Return the processor time of a process and its collected children, in seconds; 0 if it has ended."""
        if number not in self._outside:
            self._outside |= {process.pid: pid for pid, process in self._inspect_all() if process.pid == number}
        with suppress(OSError, KeyError):
            pid = self._outside[number]
            if os.stat(f"/proc/{pid}/ns/pid").st_ino == self._namespace:
                with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                    ticks = file.read().rpartition(")")[2].split()[11:15]  # its own, and that of its collected children
                return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def all(self) -> list[Process]:
        """Return the present processes, except the first."""
        return [process for _, process in self._inspect_all()]

    def _inspect_all(self) -> Iterator[tuple[int, Process]]:
        for pid in _descendants(self._first):
            with suppress(OSError):
                yield pid, _inspect(pid)


def _descendants(pid: int) -> Iterator[int]:
    """Yield all descendants, parents before their children, so that a parent is stopped before it starts more."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                children = [int(child) for child in file.read().split()]
            for child in children:
                yield child
                yield from _descendants(child)


def _inspect(pid: int) -> Process:
    """Read a process's numbers from /proc; raise `ProcessLookupError` if it has ended."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in file if line.startswith("NS"))
    if not lines.keys() >= {"NSpid", "NSpgid", "NSsid"}:
        raise ProcessLookupError(f"process {pid} has ended")
    return Process(
        **{
            name: int(lines[key].split()[-1])
            for name, key in (("pid", "NSpid"), ("group", "NSpgid"), ("session", "NSsid"))
        }
    )
