"""The interface of all sandbox backends: levels, limits, results, and the `PythonSandbox` protocol.

A `Result` says how a program ended. The status `REFUSED` says nothing about the program: the sandbox could not run it, or was
lost while it ran. A grader must not turn it into a verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from types import TracebackType
from typing import Protocol, Self

from antiphon.core.errors import UnsupportedError

LINK_READ, LINK_WRITE = 3, 4  # descriptors of a judge: from its partner, and to its partner
TOKEN_VARIABLE = "ANTIPHON_SANDBOX_TOKEN"  # environment variable with the token of a sandbox service
PARTNER_SECONDS = 10.0
JUDGE_MEMORY = 256 << 20  # bytes that a judge gets at least: limits are meant for what it judges


class Level(IntEnum):
    """Isolation of a program. A higher level includes the lower ones."""

    LIMITS = 1
    """Bounded time, memory and file size, and a clean environment; no isolation. For trusted code."""
    CONFINED = 2
    """Landlock, seccomp and, where possible, a user of its own: no network, no files, no other process."""
    ISOLATED = 3
    """Namespaces as well: processes that it starts die with it, and it sees only what it was given."""


class Status(StrEnum):
    """End of a program."""

    OK = "ok"
    """It ended by itself with exit code 0."""
    ERROR = "error"
    """It ended by itself with another exit code or an exception."""
    TIMEOUT = "timeout"
    """Its wall or processor time ran out."""
    MEMORY = "memory"
    """It asked for more memory than it may use."""
    KILLED = "killed"
    """A signal ended it that the sandbox did not send."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more output than it may."""
    REFUSED = "refused"
    """The sandbox failed: the program was not run, or its end was not seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resources that one program may use."""

    seconds: float = 10.0
    """Wall time."""
    cpu_seconds: float = 10.0
    memory: int = 512 << 20
    """Bytes of all its processes together where the kernel can count them so, else of each process."""
    file_size: int = 16 << 20
    """Maximum bytes of one file that it writes."""
    disk: int = 64 << 20
    """Maximum bytes of all its files together. Only level 3 enforces it."""
    processes: int = 32
    output: int = 1 << 20
    """Bytes of standard output that it may write, and as many of standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources that a program used."""

    seconds: float
    """Wall time."""
    cpu_seconds: float = 0.0
    peak_memory: int = 0
    """Bytes of its largest process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """End and output of a program."""

    status: Status
    level: Level
    """Isolation that it ran with."""
    exit_code: int | None = None
    """None if it did not end by itself."""
    stdout: str = ""
    stderr: str = ""
    usage: Usage = Usage(seconds=0.0)
    detail: str = ""
    """Explanation of the status, where one is needed."""


def linked_limits(limits: Limits) -> tuple[Limits, Limits]:
    """Return the limits of a judge and of its partner for the requested `limits`.

    The partner gets more time than the judge, so that the judge never sees it end because of a time limit.
    """
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
        """Run `program` as `__main__`. Nothing that the program does makes this raise.

        Args:
            program: Source code.
            stdin: Standard input.
            files: Relative path -> content, written to the working directory.
            limits: Resources of the program; by default those of the sandbox.
        """

    def run_linked(self, judge: str, partner: str, *, stdin: str = "", limits: Limits | None = None) -> Result:
        """Run two programs at the same time, each in a sandbox of its own, with a pipe in each direction between them.

        The judge gets `stdin`, and the pipes as descriptors `LINK_READ` and `LINK_WRITE`. The partner gets the other ends as
        its standard input and output, and nothing else: it shares no process, user, directory or descriptor with the judge.
        It is killed when the judge ends, and its own end is not reported.

        Args:
            judge: Trusted program; its standard output is that of the result.
            partner: Untrusted program.
            stdin: Standard input of the judge.
            limits: Resources of each of the two. The judge gets at least `JUDGE_MEMORY`.

        Returns:
            The judge's result; `REFUSED` if either program could not be run.

        Raises:
            UnsupportedError: This backend cannot link programs.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot run two linked programs")

    def close(self) -> None:
        """End all programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """End and output of a command in a `CommandSandbox`."""

    exit_code: int
    stdout: str
    stderr: str


class CommandSandbox(Protocol):
    """A sandbox that runs commands, of this machine or of a service. All methods may be called at the same time."""

    async def execute(self, command: Sequence[str], seconds: float) -> Execution:
        """Run a program with its arguments.

        Args:
            command: The program and its arguments.
            seconds: Time limit.

        Raises:
            SandboxError: The sandbox is lost, or the command did not end by itself.
        """

    async def write(self, path: str, content: str) -> None:
        """Write a file with ASCII text, and create its parent directories; raise `SandboxError` if that fails."""
