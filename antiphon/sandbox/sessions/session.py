"""A long-lived shell session in a sandbox. It runs one command at a time, each with its own output, exit code and deadline.

Directory, variables, functions, aliases and options persist from one command to the next. At its deadline a command is
interrupted, as by Ctrl-C, and its process groups are killed; the shell keeps its state. A shell that does not come back is
killed as well. After the end of a shell, for whatever reason, the next command gets a new one: the last result has `ended` set,
and the `shell` of the next is one higher.

Differences from a terminal: there is none, `exec > file` holds for its command only, and output that a background job writes
after its command has ended is dropped. As in a terminal, the shell reports on stderr when such a job has ended.
"""

import asyncio
import signal
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.errors import SandboxError, StallError
from antiphon.sandbox.base import Result, Status, Usage
from antiphon.sandbox.sessions.command import STDERR, STDOUT, Command, OutputCallback
from antiphon.sandbox.sessions.shell import GRACE_SECONDS, STOP_SECONDS, Shell
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

SIGNALLED = 128  # a shell reports a process that a signal ended by the signal's number above this exit code
MAX_BACKGROUND = 16  # ended commands whose background jobs may still write; beyond it, the oldest job gets SIGPIPE


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult(Result):
    """Result of a command. `stdout` and `stderr` are decoded as UTF-8, with U+FFFD for invalid bytes."""

    chunks: tuple[tuple[int, bytes], ...] = ()
    """Output as (1 for stdout or 2 for stderr, bytes). The order is exact within a stream. Between streams it is the order of
    arrival, which may differ from the order of writing; `2>&1` preserves that."""
    dropped: int = 0
    """Bytes of both streams beyond the limit."""
    ended: bool = False
    """True if the shell ended with this command; its directory, variables and functions are lost."""
    shell: int = 1
    """Number of the shell in its session that ran the command, from 1."""

    def raw(self, *streams: int) -> bytes:
        """Return the output of `streams`, by default of both."""
        return b"".join(content for stream, content in self.chunks if not streams or stream in streams)


class Session:
    """One shell session of a sandbox. Concurrent commands run one after the other."""

    def __init__(self, sandbox: ShellSandbox) -> None:
        """Start nothing yet; the first command starts a shell."""
        self._sandbox = sandbox
        self._lock = asyncio.Lock()
        self._shell: Shell | None = None
        self._shells = 0
        self._background: deque[Command] = deque()

    async def run(
        self,
        command: str,
        *,
        stdin: bytes | Path = b"",
        seconds: float | None = None,
        output: int | None = None,
        receive: OutputCallback | None = None,
    ) -> CommandResult:
        """Run a command of one or more lines. Nothing that the command does makes this raise.

        Args:
            command: Text for bash.
            stdin: Standard input, as bytes or as a file of this machine.
            seconds: Deadline; by default that of the sandbox.
            output: Bytes of each stream that are kept; by default as many as the sandbox allows.
            receive: Called with (1 or 2, bytes) as output arrives, also beyond the limit.

        Raises:
            SandboxError: The sandbox is lost.
        """
        try:
            text = command.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            return self._refused(f"the command is not valid text: {error}")
        if b"\0" in text:
            return self._refused("a command cannot contain a NUL character")
        limits = self._sandbox.config.limits
        keep = limits.output if output is None else output
        async with self._lock:
            for _ in range(2):  # a shell may have ended unnoticed since the last command; this one has not begun then
                shell = await self._ready_shell()
                started = Command(self._sandbox.directory, stdin, keep, receive)
                shell.start_command(text, started)
                result = await self._await_result(shell, started, limits.seconds if seconds is None else seconds)
                if not (result.ended and started.last_pid is None):
                    break
            return result

    async def interrupt(self) -> None:
        """Interrupt the command under way, if any, as Ctrl-C does. The command may handle or ignore that."""
        if self._shell is not None:
            await self._shell.interrupt()

    def close(self) -> None:
        """End the shell and the processes of its session."""
        if self._shell is not None:
            self._shell.close()
            self._shell = None
        while self._background:
            self._background.popleft().close()

    async def _ready_shell(self) -> Shell:
        if self._sandbox.ended.done():
            raise SandboxError(f"sandbox {self._sandbox.directory.name} has ended, and its content is lost")
        if self._shell is None or self._shell.gone.done():
            self.close()
            self._shell = Shell(self._sandbox)
            self._shells += 1
        shell = self._shell
        await self._sandbox.wait(asyncio.shield(shell.ready), "shell")
        return shell

    async def _await_result(self, shell: Shell, command: Command, seconds: float) -> CommandResult:
        """Wait until a command has ended; stop it at its deadline."""
        loop = asyncio.get_running_loop()
        begun, used, status, kills = loop.time(), shell.cpu_seconds, Status.OK, self._sandbox.memory_kills()
        end = None  # time by which the shell must come back from a stop
        try:
            try:
                await self._sandbox.wait(asyncio.shield(command.finished), "command", seconds)
            except StallError:
                status, end = Status.TIMEOUT, loop.time() + STOP_SECONDS
                await shell.stop(end)
            command.take_output()
            if command.interrupted:
                await shell.resynchronize(loop.time() + GRACE_SECONDS if end is None else end)
        except BaseException:  # cancelled, or the sandbox is lost: leave nothing that could affect a later command
            command.take_output()
            command.close()
            self.close()
            raise
        self._keep_reading(command)
        if status is Status.OK and self._sandbox.memory_kills() > kills:
            status = Status.MEMORY
        usage = Usage(seconds=loop.time() - begun, cpu_seconds=max(0.0, shell.cpu_seconds - used))
        return self._result(shell, command, status, usage)

    def _keep_reading(self, command: Command) -> None:
        """Keep reading the output of background jobs, so that they are not blocked."""
        self._background = deque(other for other in (*self._background, command) if not other.is_silent)
        while len(self._background) > MAX_BACKGROUND:
            self._background.popleft().close()

    def _result(self, shell: Shell, command: Command, status: Status, usage: Usage) -> CommandResult:
        code, chunks = command.finished.result(), tuple(command.chunks)
        ended = shell.gone.done()
        detail = []
        if ended:
            detail.append("the shell has ended")
        if command.dropped:
            detail.append(f"{command.dropped} bytes of output were dropped")
        if status is Status.OK:
            if ended and (code is None or code - SIGNALLED in signal.valid_signals()):
                status, code = Status.KILLED, None
            elif command.dropped:
                status = Status.OUTPUT_LIMIT
            elif code:
                status = Status.ERROR
        return CommandResult(
            status=status,
            level=self._sandbox.level,
            exit_code=None if status is Status.TIMEOUT else code,
            stdout=b"".join(content for stream, content in chunks if stream == STDOUT).decode("utf-8", "replace"),
            stderr=b"".join(content for stream, content in chunks if stream == STDERR).decode("utf-8", "replace"),
            usage=usage,
            detail="; ".join(detail),
            chunks=chunks,
            dropped=command.dropped,
            ended=ended,
            shell=self._shells,
        )

    def _refused(self, reason: str) -> CommandResult:
        return CommandResult(
            status=Status.ERROR, level=self._sandbox.level, exit_code=2, stderr=reason, shell=self._shells
        )
