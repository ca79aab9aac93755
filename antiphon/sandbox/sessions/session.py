"""A long-lived shell session in a box: commands one after the other, each with its own output, exit code and deadline.

Directory, variables, functions, aliases and options last from one command to the next. When its time is up a command is
interrupted as by Ctrl-C and its process groups are killed; the shell goes on with what it knew. A shell that does not come
back is killed, too. After the end of a shell, whatever its reason, the next command gets a new one: the result of the last
says `ended`, and that of the next counts one `shell` more.

What differs from a terminal: there is none, `exec > file` lasts for its command only, and what a job in the background writes
after the end of its command is read and dropped. As in a terminal, the shell says on stderr when such a job has ended.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.errors import SandboxError, StallError
from antiphon.sandbox.base import Result, Status, Usage
from antiphon.sandbox.sessions.shell import GRACE_SECONDS, STDERR, STDOUT, STOP_SECONDS, Command, OutputCallback, Shell
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

SIGNALLED = 128  # exit codes above this one are how a shell says that a signal ended what it waited for
LINGERING = 16  # commands whose jobs in the background may still write; of one more, the oldest gets SIGPIPE


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult(Result):
    """How a command ended. `stdout` and `stderr` are decoded as UTF-8, with U+FFFD for what is none."""

    chunks: tuple[tuple[int, bytes], ...] = ()
    """What was written, as (1 for stdout or 2 for stderr, bytes): exact within a stream, and between the two in the order of
    arrival, which may differ from the order of writing. Who needs that one writes `2>&1`."""
    dropped: int = 0
    """Bytes that were written beyond the limit, of both streams."""
    ended: bool = False
    """Whether the shell ended with this command: directory, variables and functions are lost."""
    shell: int = 1
    """Which shell of its session ran it, counted from 1."""

    def raw(self, *streams: int) -> bytes:
        """What was written to `streams`, to both if none is named."""
        return b"".join(content for stream, content in self.chunks if not streams or stream in streams)


class Session:
    """One shell session of a box. Commands that are given at the same time run one after the other."""

    def __init__(self, box: ShellSandbox) -> None:
        """Nothing is started before the first command."""
        self._box = box
        self._turn = asyncio.Lock()
        self._shell: Shell | None = None
        self._shells = 0
        self._lingering: deque[Command] = deque()

    async def run(
        self,
        command: str,
        *,
        stdin: bytes | Path = b"",
        seconds: float | None = None,
        output: int | None = None,
        receive: OutputCallback | None = None,
    ) -> CommandResult:
        """Run a command, or several lines of them. Never raises for what it does; `SandboxError` if the box is lost.

        `seconds` and `output` (bytes of each stream that are kept) replace the limits of the box. `receive` is called with
        (1 or 2, bytes) as output arrives, with that beyond the limit as well. A command reads `stdin` (bytes, or those of a
        file of this machine), and then the end of it.
        """
        try:
            text = command.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            return self._refused(f"the command is no text: {error}")
        if b"\0" in text:
            return self._refused("a command cannot contain a NUL character")
        limits = self._box.config.limits
        keep = limits.output if output is None else output
        async with self._turn:
            for _ in range(2):  # a shell may have ended since the last command, unseen: then this one has not begun
                shell = await self._living()
                started = Command(self._box.room, stdin, keep, receive)
                shell.begin(text, started)
                result = await self._see_through(shell, started, limits.seconds if seconds is None else seconds)
                if not (result.ended and started.last is None):
                    break
            return result

    async def interrupt(self) -> None:
        """Do to the command under way what Ctrl-C does; nothing if there is none. What it makes of that is its own affair."""
        if self._shell is not None:
            await self._shell.interrupt()

    def close(self) -> None:
        """End the shell and all that it started and that did not leave its session."""
        if self._shell is not None:
            self._shell.close()
            self._shell = None
        while self._lingering:
            self._lingering.popleft().close()

    async def _living(self) -> Shell:
        if self._box.ended.done():
            raise SandboxError(f"box {self._box.room.name} has ended, and with it all that was in it")
        if self._shell is None or self._shell.gone.done():
            self.close()
            self._shell = Shell(self._box)
            self._shells += 1
        shell = self._shell
        await self._box.wait(asyncio.shield(shell.ready), "shell")
        return shell

    async def _see_through(self, shell: Shell, command: Command, seconds: float) -> CommandResult:
        """Wait for the end of a command, or bring it about."""
        loop = asyncio.get_running_loop()
        begun, used, status, kills = loop.time(), shell.cpu_seconds, Status.OK, self._box.memory_kills()
        end = None  # of the time that the shell has to come back from a stop
        try:
            try:
                await self._box.wait(asyncio.shield(command.finished), "command", seconds)
            except StallError:
                status, end = Status.TIMEOUT, loop.time() + STOP_SECONDS
                await shell.stop(end)
            command.settle()
            if command.interrupted:
                await shell.settle(loop.time() + GRACE_SECONDS if end is None else end)
        except BaseException:  # cancelled, or the box is lost: nothing must be left that a later command could meet
            command.settle()
            command.close()
            self.close()
            raise
        self._linger(command)
        if status is Status.OK and self._box.memory_kills() > kills:
            status = Status.MEMORY
        usage = Usage(seconds=loop.time() - begun, cpu_seconds=max(0.0, shell.cpu_seconds - used))
        return self._result(shell, command, status, usage)

    def _linger(self, command: Command) -> None:
        """Go on reading what jobs in the background write, so that they can go on."""
        self._lingering = deque(other for other in (*self._lingering, command) if not other.silent)
        while len(self._lingering) > LINGERING:
            self._lingering.popleft().close()

    def _result(self, shell: Shell, command: Command, status: Status, usage: Usage) -> CommandResult:
        code, chunks = command.finished.result(), tuple(command.chunks)
        ended = shell.gone.done()
        detail = []
        if ended:
            detail.append("the shell has ended")
        if command.dropped:
            detail.append(f"{command.dropped} bytes of output were dropped")
        if status is Status.OK:
            if ended and (code is None or code > SIGNALLED):
                status, code = Status.KILLED, None
            elif command.dropped:
                status = Status.OUTPUT_LIMIT
            elif code:
                status = Status.ERROR
        return CommandResult(
            status=status,
            level=self._box.level,
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
        return CommandResult(status=Status.ERROR, level=self._box.level, exit_code=2, stderr=reason, shell=self._shells)
