"""The processes of a box as the machine outside sees them, and signals to them that cannot hit another.

A number of a process may be given to another at any time, so a process is first held (`pidfd_open`), then looked at, and
only then signalled. What is looked at is the kernel's word: nothing that the box says is needed here.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process; all numbers are those of the box."""

    pid: int
    group: int
    session: int


class Processes:
    """The processes in the namespace of one first process."""

    def __init__(self, first: int) -> None:
        """`first` is the number, here, of the process that is number 1 there. `OSError` if it has ended."""
        self._first = first
        self._namespace = os.stat(f"/proc/{first}/ns/pid").st_ino
        self._outside: dict[int, int] = {}  # numbers of this machine, by those of the box

    def signal(self, number: signal.Signals, wanted: Callable[[Process], bool]) -> None:
        """Send a signal to all processes that are `wanted`, the first excepted."""
        for pid in list(_descendants(self._first)):
            with suppress(OSError):  # it has ended
                held = os.pidfd_open(pid)
                try:
                    process = _look(pid)
                    if os.stat(f"/proc/{pid}/ns/pid").st_ino == self._namespace and wanted(process):
                        signal.pidfd_send_signal(held, number)
                finally:
                    os.close(held)

    def cpu_seconds(self, number: int) -> float:
        """Processor time of a process and of all that it has waited for; 0 if it has ended."""
        if number not in self._outside:
            self._outside |= {process.pid: pid for pid, process in self._seen() if process.pid == number}
        with suppress(OSError, KeyError):
            pid = self._outside[number]
            if os.stat(f"/proc/{pid}/ns/pid").st_ino == self._namespace:
                with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                    ticks = file.read().rpartition(")")[2].split()[11:15]  # its own, and of its children
                return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def all(self) -> list[Process]:
        """Those that are there now, the first excepted."""
        return [process for _, process in self._seen()]

    def _seen(self) -> Iterator[tuple[int, Process]]:
        for pid in _descendants(self._first):
            with suppress(OSError):
                yield pid, _look(pid)


def _descendants(pid: int) -> Iterator[int]:
    """Children before their children, so that a parent is stopped before it makes more."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                children = [int(child) for child in file.read().split()]
            for child in children:
                yield child
                yield from _descendants(child)


def _look(pid: int) -> Process:
    """`ProcessLookupError` if there is nothing to see any more."""
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
