"""One bash process in a sandbox, controlled through named pipes.

    controller                                         bash, in the sandbox
    creates pipes for stdout and stderr
    writes the command to a file
    <name>.lines    -- run this nonce, then report -->
    <name>.reports  <-- begin NONCE LAST --------------  LAST: the highest process number so far
                                                         sources the file, with the pipes as stdout and stderr
    <name>.reports  <-- end NONCE CODE ----------------
    reads exactly the bytes that the pipes hold now, a number that the kernel knows

The protocol needs no prompt, no marker in the output and no waiting for silence. Output that a background job writes later
goes to the pipes of its own command and is dropped. `gone CODE`, or the end of the reports, means that the shell has ended.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import SandboxError, StallError
from antiphon.sandbox.sessions.command import Command
from antiphon.sandbox.sessions.config import CONTROL
from antiphon.sandbox.sessions.pipe_reader import CHUNK
from antiphon.sandbox.sessions.processes import Process
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

GRACE_SECONDS = 10.0  # for a shell to come back after an interrupt, on a machine that may be loaded
STOP_SECONDS = 1.25  # the same after a command's deadline, so that the caller waits at most 2 s beyond it
KILL_SECONDS = 0.25  # for the report that a killed shell has ended; after that it counts as ended
ROUND_SECONDS = 0.02, 0.5  # between two rounds of signals: at first, and at most
AGAIN_SECONDS = 1.0  # between two interrupts of a process
LONGEST_REPORT = 128  # bytes; a longer line does not come from the shell

T = TypeVar("T")

# Each line begins with a line end, which is all that an interrupt at a bad moment can remove. Aliases, functions, options and
# the user's IFS do not affect these lines. `{status}` restores `$?` of the previous command.
_READY = "\nPS1= PS2= PROMPT_COMMAND=; set -m +o history +H; printf '%s\\n' \"ready $$\" > {reports}\n"
_BEGIN = (
    "\nIFS=' ' \\builtin read -r _ _ _ _ _antiphon < /proc/loadavg;"
    " \\builtin printf '%s\\n' \"begin {nonce} $_antiphon\" > {reports};"
    " {status}\\builtin source {command} < {path}.in > {path}.out 2> {path}.err\n"
)
_END = "\\builtin printf '%s\\n' \"end {nonce} $?\" > {reports}\n"
_SYNC = "\n\\builtin printf '%s\\n' 'sync {nonce}' > {reports}\n"


class Shell:
    """One bash process. It runs one command at a time; the caller ensures that."""

    def __init__(self, sandbox: ShellSandbox) -> None:
        """Request the start of the shell. `ready` is done once it runs."""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[int] = loop.create_future()  # its process number in the sandbox
        self.gone: asyncio.Future[int | None] = loop.create_future()  # its exit code, if known
        self._sandbox = sandbox
        self._parent = 0  # process number of its parent, which the parent reports; 0: not yet
        self._command: Command | None = None
        self._code = 0  # exit code of the previous command
        self._synced_nonce = ""
        self._sync_reply: asyncio.Future[None] | None = None
        self._partial = b""
        name = sandbox.new_name()
        lines, reports, self._text = self._paths = [
            sandbox.directory / f"{name}.{kind}" for kind in ("lines", "reports", "command")
        ]
        for path, mode in ((lines, 0o644), (reports, 0o622)):
            os.mkfifo(path)
            path.chmod(mode)
        self._lines = os.open(lines, os.O_RDWR | os.O_NONBLOCK)
        self._reports = os.open(reports, os.O_RDONLY | os.O_NONBLOCK)
        loop.add_reader(self._reports, self._read)
        sandbox.start_session(name)
        self._write_lines(_READY)
        sandbox.ended.add_done_callback(self._on_sandbox_ended)

    @property
    def _started(self) -> bool:
        return self.ready.done() and self.ready.exception() is None

    def start_command(self, text: bytes, command: Command) -> None:
        """Start a command. Its `finished` is done once it has ended, or the shell has."""
        self._text.write_bytes(text)
        self._text.chmod(0o644)
        status = f"(\\builtin exit {self._code}) || " if self._code else ""
        self._command = command
        self._write_lines(_BEGIN + _END, nonce=command.nonce, path=f"{CONTROL}/{command.nonce}", status=status)
        if self.gone.done():
            succeed(command.finished, self.gone.result())

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the shell and of what it has run so far; 0 once it has ended."""
        return self._sandbox.processes.cpu_seconds(self.ready.result()) if not self.gone.done() else 0.0

    async def interrupt(self) -> None:
        """Send SIGINT to each process of the command under way, as Ctrl-C does, until it ends or its grace period is over.

        The signal is repeated, because a process that is just being started loses the first one.
        """
        command, signalled, now = self._command, dict[int, float](), asyncio.get_running_loop().time
        if command is None or not self._started:
            return
        command.interrupted = True

        def is_due(process: Process) -> bool:
            elapsed = now() - signalled.get(process.pid, -AGAIN_SECONDS) >= AGAIN_SECONDS
            due = elapsed and (process.pid == self.ready.result() or self._is_of_command(process))
            signalled.update({process.pid: now()} if due else {})
            return due

        def send_interrupt() -> None:
            self._sandbox.processes.signal(signal.SIGINT, is_due)
            self._write_lines(_END, nonce=command.nonce)  # the interrupt may have hit the report

        await self._repeat_until_finished(command, send_interrupt, asyncio.get_running_loop().time() + GRACE_SECONDS)

    async def stop(self, end: float) -> None:
        """Kill the command under way and all its process groups, and the shell if it has not come back by `end`.

        Args:
            end: Time by the clock of the event loop.
        """
        command, shell = self._command, self.ready.result()
        assert command is not None
        command.interrupted = True

        def kill() -> None:
            # The shell first: otherwise it continues after the killed part of the command.
            self._sandbox.processes.signal(signal.SIGINT, lambda process: process.pid == shell)
            self._sandbox.processes.signal(signal.SIGKILL, self._is_of_command)
            self._write_lines(_END, nonce=command.nonce)  # the interrupt may have hit the report

        await self._repeat_until_finished(command, kill, end)
        if not command.finished.done():
            await self._give_up()

    async def resynchronize(self, end: float) -> None:
        """After an interrupt, wait until the shell has read all its input; kill it if it has not by `end`.

        Args:
            end: Time by the clock of the event loop.
        """
        loop = asyncio.get_running_loop()
        pause = max(KILL_SECONDS, (end - loop.time()) / 4)
        while not self.gone.done():
            nonce, self._sync_reply = secrets.token_hex(8), loop.create_future()
            self._write_lines(_SYNC, nonce=nonce)
            await self._wait_quietly(pause, self._sync_reply)
            if self._synced_nonce == nonce:
                return
            if loop.time() >= end:
                await self._give_up()

    def kill(self) -> None:
        """Kill the shell, its session, and the parent that reports its end, which a program may have stopped."""
        if self._started and not self._sandbox.ended.done():
            number, parent = self.ready.result(), self._parent
            self._sandbox.processes.signal(
                signal.SIGKILL, lambda process: process.session == number or process.pid == parent
            )

    async def _give_up(self) -> None:
        """Kill a shell that does not come back, and treat it as ended whatever the sandbox reports."""
        self.kill()
        await self._wait_quietly(KILL_SECONDS, self.gone)
        self._on_end(None)

    def close(self) -> None:
        """Kill the shell and close its pipes. A second call does nothing."""
        self._sandbox.ended.remove_done_callback(self._on_sandbox_ended)
        self.kill()
        self._on_end(None)
        for path in self._paths:
            path.unlink(missing_ok=True)

    async def _wait_quietly(self, seconds: float, future: "asyncio.Future[T]") -> None:
        with suppress(StallError):
            await self._sandbox.wait(asyncio.shield(future), "stop", seconds)

    async def _repeat_until_finished(self, command: Command, act: Callable[[], None], end: float) -> None:
        """Call `act` again and again until the command has ended, or until `end`: it may start processes meanwhile."""
        loop = asyncio.get_running_loop()
        pause, most = ROUND_SECONDS
        while not command.finished.done() and loop.time() < end:
            act()
            await self._wait_quietly(pause, command.finished)
            pause = min(2 * pause, most)

    def _is_of_command(self, process: Process) -> bool:
        """Return True if a process belongs to the command: its group was made after the command began.

        A command substitution runs in the group of the shell, so its process number is compared instead.
        """
        shell, last_pid = self.ready.result(), None if self._command is None else self._command.last_pid
        first = process.pid if process.group == shell else process.group
        return process.session == shell != process.pid and last_pid is not None and first > last_pid

    def _write_lines(self, lines: str, **names: str) -> None:
        if self._lines >= 0:
            names |= {"reports": f"{CONTROL}/{self._paths[1].name}", "command": f"{CONTROL}/{self._text.name}"}
            with suppress(BlockingIOError):  # it reads no more; the wait for its answer ends it
                os.write(self._lines, lines.format_map(names).encode())

    # --- reports ----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        content = os.read(self._reports, CHUNK)
        if not content:
            self._on_end(None)
            return
        *lines, self._partial = (self._partial + content).split(b"\n")
        self._partial = self._partial[:LONGEST_REPORT]
        for line in lines:
            self._handle_report(line[:LONGEST_REPORT].decode("ascii", "replace").split())

    def _handle_report(self, words: list[str]) -> None:
        """Handle one report. Anything else, and reports about a command that is over, is ignored."""
        command = self._command
        match words:
            case ["parent", number] if number.isdigit() and not self._parent:
                self._parent = int(number)
            case ["ready", number] if number.isdigit():
                for pipe in (self._sandbox.directory / "keeper", self._paths[0]):
                    pipe.chmod(0)  # both are open by now, and no other process may read from them
                succeed(self.ready, int(number))
            case ["begin", nonce, last] if command and nonce == command.nonce and last.isdigit():
                command.last_pid = int(last)
            case ["end", nonce, code] if command and nonce == command.nonce and code.isdigit():
                self._code = int(code)
                succeed(command.finished, self._code)
            case ["sync", nonce] if self._sync_reply is not None:
                self._synced_nonce = nonce
                succeed(self._sync_reply, None)
            case ["gone", code] if code.isdigit():
                self._on_end(int(code))

    def _on_sandbox_ended(self, _: "asyncio.Future[None]") -> None:
        self._on_end(None)

    def _on_end(self, code: int | None) -> None:
        """Handle the end of the shell, and with it of its command."""
        if self._lines >= 0:
            asyncio.get_running_loop().remove_reader(self._reports)
            os.close(self._reports)
            os.close(self._lines)
            self._reports = self._lines = -1
        succeed(self.gone, code)
        fail(self.ready, SandboxError("a shell ended before it was ready"))
        if self._command is not None:
            succeed(self._command.finished, code)
