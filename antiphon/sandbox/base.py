"""What a sandbox is asked, and what it answers: the same for every backend.

A `Result` says how a program ended. `REFUSED` alone says nothing about the program: the sandbox could not run it, or was lost
under it. Whoever grades must not make a verdict of that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from types import TracebackType
from typing import Protocol, Self

from antiphon.core.errors import UnsupportedError

LINK_READ, LINK_WRITE = 3, 4  # descriptors of a judge: what its partner writes, and what its partner reads
TOKEN_VARIABLE = "ANTIPHON_SANDBOX_TOKEN"  # of the environment: what a service demands, and its clients show
PARTNER_SECONDS = 10.0
JUDGE_MEMORY = 256 << 20  # bytes: limits are meant for what is judged


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


def linked_limits(limits: Limits) -> tuple[Limits, Limits]:
    """Return the limits of a judge and of its partner, where `limits` are asked for. The partner has more time than the judge,
    which thereby sees its end for no other reason than its own."""
    ours = replace(limits, memory=max(limits.memory, JUDGE_MEMORY))
    return ours, replace(limits, seconds=limits.seconds + PARTNER_SECONDS)


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

    def run_linked(self, judge: str, partner: str, *, stdin: str = "", limits: Limits | None = None) -> Result:
        """Run two programs at the same time, each in a sandbox of its own, with a pipe each way between them.

        The judge gets `stdin`, and the pipes as descriptors `LINK_READ` and `LINK_WRITE`. The partner gets the other ends as
        its standard input and output, and nothing else: it shares no process, user, directory or descriptor with the judge.
        It is killed when the judge ends, and what becomes of it is not reported.

        Args:
            judge: Program that is trusted; its standard output is the result's.
            partner: Program that is not.
            stdin: Standard input of the judge.
            limits: What each of the two may use. The judge has at least `JUDGE_MEMORY`.

        Returns:
            How the judge ended; `REFUSED` if either of the two could not be run.

        Raises:
            UnsupportedError: This backend cannot link programs.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot run two programs that are linked")

    def close(self) -> None:
        """End whatever runs."""
