"""What a sandbox is asked, and what it answers: the same for every backend.

A `Result` says how a program ended. `REFUSED` alone says nothing about the program: the sandbox could not run it, or was lost
under it. Whoever grades must not make a verdict of that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import TracebackType
from typing import Protocol, Self

TOKEN_VARIABLE = "ANTIPHON_SANDBOX_TOKEN"  # of the environment: what a service demands, and its clients show


class Level(IntEnum):
    """How far a program is kept from the machine; a higher one contains those below."""

    LIMITS = 1
    """Time, memory and file size are bounded, the environment is clean, nothing else: for code that is trusted."""
    CONFINED = 2
    """Landlock, seccomp, and a uid of its own where that can be had: no network, no files, no other process."""
    ISOLATED = 3
    """Namespaces as well: what it starts dies with it, and it sees nothing but what it was given."""


class Status(StrEnum):
    """How a program ended."""

    OK = "ok"
    """By itself, with exit code 0."""
    ERROR = "error"
    """By itself, with another exit code or an exception."""
    TIMEOUT = "timeout"
    """Its wall or processor time ran out."""
    MEMORY = "memory"
    """It asked for more memory than it may have."""
    KILLED = "killed"
    """By a signal that the sandbox did not send."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than is kept."""
    REFUSED = "refused"
    """It was not run, or its end was not seen: a fault of the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use."""

    seconds: float = 10.0
    """Wall time."""
    cpu_seconds: float = 10.0
    memory: int = 512 << 20
    """Bytes, of all its processes where the kernel can count them so, else of each."""
    file_size: int = 16 << 20
    """Bytes of the largest file it may write."""
    disk: int = 64 << 20
    """Bytes of all its files together; only level 3 bounds them."""
    processes: int = 32
    output: int = 1 << 20
    """Bytes of standard output that are kept, and as many of standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a program used."""

    seconds: float
    """Wall time."""
    cpu_seconds: float = 0.0
    peak_memory: int = 0
    """Bytes, of its largest process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a program ended, and what it left."""

    status: Status
    level: Level
    """What it was kept apart with."""
    exit_code: int | None = None
    """None if it did not end by itself."""
    stdout: str = ""
    stderr: str = ""
    usage: Usage = Usage(seconds=0.0)
    detail: str = ""
    """Why, where the status does not say it all."""


class PythonSandbox(Protocol):
    """Runs Python programs, each in a fresh process and an empty directory. May be called from several threads."""

    level: Level

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, program: str, *, stdin: str = "", files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> Result:
        """Run `program` as `__main__`, with `files` (relative path: content) in its working directory. Never raises for what a
        program does."""

    def close(self) -> None:
        """End whatever runs."""
