"""One bash process of a box, and how it is told what to do.

    controller                                         bash, of the box
    a new pipe each for stdout and stderr
    the command in a file
    <name>.lines    -- run this nonce, then report -->
    <name>.reports  <-- begin NONCE LAST --------------  LAST: the highest number of a process so far
                                                         evaluates the file, with the pipes as stdout and stderr
    <name>.reports  <-- end NONCE CODE ----------------
    takes what the pipes hold at that moment: the kernel knows how many bytes that is

There is no prompt, no marker and no time to settle. What a job in the background writes later goes to the pipes of its own
command, which nobody keeps. `gone CODE`, or the end of the reports, says that the shell itself has ended.
"""

import asyncio
import os
import secrets
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import SandboxError, StallError
from antiphon.sandbox.sessions.config import CONTROL
from antiphon.sandbox.sessions.pipe_reader import CHUNK, PipeReader
from antiphon.sandbox.sessions.processes import Process
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

STDOUT, STDERR = 1, 2
GRACE_SECONDS = 10.0  # for a shell to come back after an interrupt, on a machine that may be loaded
STOP_SECONDS = (
    1.25  # the same after the time of a command has run out: what it does costs its caller no more than 2 s beyond
)
KILL_SECONDS = 0.25  # for the end of a shell that was killed to be reported; after that it is taken for ended
ROUND_SECONDS = 0.02, 0.5  # between two rounds of signals: at first, and at most
AGAIN_SECONDS = 1.0  # between two interrupts of a process
LONGEST_REPORT = 128  # bytes; what a box writes beyond that is not from its shell

OutputCallback = Callable[[int, bytes], None]
T = TypeVar("T")

# Each begins with a line end, which is all that an interrupt in the wrong moment can take away. Aliases, functions, options
# and the user's IFS change nothing here; `{status}` is what `$?` was after the command before.
_READY = "\nPS1= PS2= PROMPT_COMMAND=; set -m +o history +H; printf '%s\\n' \"ready $$\" > {reports}\n"
_BEGIN = (
    "\nIFS=' ' \\builtin read -r _ _ _ _ _antiphon < /proc/loadavg;"
    " \\builtin printf '%s\\n' \"begin {nonce} $_antiphon\" > {reports};"
    " {status}\\builtin source {command} < {path}.in > {path}.out 2> {path}.err\n"
)
_END = "\\builtin printf '%s\\n' \"end {nonce} $?\" > {reports}\n"
_SYNC = "\n\\builtin printf '%s\\n' 'sync {nonce}' > {reports}\n"


class Command:
    """One command under way: its files, its pipes, and what is known of it."""

    def __init__(self, room: Path, stdin: bytes | Path, keep: int, receive: OutputCallback | None) -> None:
        """`keep`: bytes of each stream that are kept; `receive` is called with all that arrives."""
        self.nonce = secrets.token_hex(8)
        self.chunks: list[tuple[int, bytes]] = []
        self.dropped = 0  # bytes
        self.last: int | None = None  # the highest number of a process before it began; None: it has not begun
        self.finished: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()  # with its exit code
        self.interrupted = False
        self._receive = receive
        self._left = {STDOUT: keep, STDERR: keep}
        self._stdin = room / f"{self.nonce}.in"
        if isinstance(stdin, Path):
            shutil.copyfile(stdin, self._stdin)
        else:
            self._stdin.write_bytes(stdin)
        self._stdin.chmod(0o644)
        self._outlets = [
            PipeReader(room / f"{self.nonce}.out", lambda content: self._take(STDOUT, content)),
            PipeReader(room / f"{self.nonce}.err", lambda content: self._take(STDERR, content)),
        ]

    @property
    def silent(self) -> bool:
        """Whether nothing that it started can write any more."""
        return all(outlet.closed for outlet in self._outlets)

    def settle(self) -> None:
        """Take what has been written by now, and nothing that comes later."""
        for outlet in self._outlets:
            outlet.settle()
        self._stdin.unlink(missing_ok=True)

    def close(self) -> None:
        """Read no more: what still writes is sent SIGPIPE."""
        for outlet in self._outlets:
            outlet.close()

    def _take(self, stream: int, content: bytes) -> bool:
        kept = content[: self._left[stream]]
        self._left[stream] -= len(kept)
        self.dropped += len(content) - len(kept)
        if kept:
            self.chunks.append((stream, kept))
        if self._receive is not None:
            self._receive(stream, content)
        return bool(kept) or self._receive is not None


class Shell:
    """One bash process. It runs one command at a time; who calls sees to that."""

    def __init__(self, box: ShellSandbox) -> None:
        """Have it started; `ready` says when it is."""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[int] = loop.create_future()  # with its number in the box
        self.gone: asyncio.Future[int | None] = loop.create_future()  # with its exit code, if that is known
        self._box = box
        self._parent = 0  # its number in the box, which it reports; 0: not yet
        self._command: Command | None = None
        self._code = 0  # of the command before
        self._synced = ""
        self._waking: asyncio.Future[None] | None = None
        self._partial = b""
        name = box.new_name()
        lines, reports, self._text = self._paths = [
            box.room / f"{name}.{kind}" for kind in ("lines", "reports", "command")
        ]
        for path, mode in ((lines, 0o644), (reports, 0o622)):
            os.mkfifo(path)
            path.chmod(mode)
        self._lines = os.open(lines, os.O_RDWR | os.O_NONBLOCK)
        self._reports = os.open(reports, os.O_RDONLY | os.O_NONBLOCK)
        loop.add_reader(self._reports, self._read)
        box.start_session(name)
        self._tell(_READY)
        box.ended.add_done_callback(self._box_ended)

    @property
    def _started(self) -> bool:
        return self.ready.done() and self.ready.exception() is None

    def begin(self, text: bytes, command: Command) -> None:
        """Have a command run. Its `finished` says when it has ended, or the shell has."""
        self._text.write_bytes(text)
        self._text.chmod(0o644)
        status = f"(\\builtin exit {self._code}) || " if self._code else ""
        self._command = command
        self._tell(_BEGIN + _END, nonce=command.nonce, path=f"{CONTROL}/{command.nonce}", status=status)
        if self.gone.done():
            succeed(command.finished, self.gone.result())

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the shell and of what it has run so far, as the kernel counts it; 0 once it is gone."""
        return self._box.processes.cpu_seconds(self.ready.result()) if not self.gone.done() else 0.0

    async def interrupt(self) -> None:
        """Do to the command under way what Ctrl-C does, to each process, and again after a while: what is just being started
        loses the first. Return when it has ended, or has had its time."""
        command, told, now = self._command, dict[int, float](), asyncio.get_running_loop().time
        if command is None or not self._started:
            return
        command.interrupted = True

        def wanted(process: Process) -> bool:
            late = now() - told.get(process.pid, -AGAIN_SECONDS) >= AGAIN_SECONDS
            due = late and (process.pid == self.ready.result() or self._is_of_command(process))
            told.update({process.pid: now()} if due else {})
            return due

        def act() -> None:
            self._box.processes.signal(signal.SIGINT, wanted)
            self._tell(_END, nonce=command.nonce)  # the interrupt may have hit the report

        await self._in_rounds(command, act, asyncio.get_running_loop().time() + GRACE_SECONDS)

    async def stop(self, end: float) -> None:
        """End the command under way and all its process groups, and the shell if it has not come back from that at `end`, by
        the clock of the event loop."""
        command, shell = self._command, self.ready.result()
        assert command is not None
        command.interrupted = True

        def kill() -> None:
            # The shell first: else it goes on with what comes after what was killed.
            self._box.processes.signal(signal.SIGINT, lambda process: process.pid == shell)
            self._box.processes.signal(signal.SIGKILL, self._is_of_command)
            self._tell(_END, nonce=command.nonce)  # the interrupt may have hit the report

        await self._in_rounds(command, kill, end)
        if not command.finished.done():
            await self._replace()

    async def settle(self, end: float) -> None:
        """After an interrupt: see that the shell is there, and has read all that it was told; kill it if that is not so at
        `end`, by the clock of the event loop."""
        loop = asyncio.get_running_loop()
        pause = max(KILL_SECONDS, (end - loop.time()) / 4)
        while not self.gone.done():
            nonce, self._waking = secrets.token_hex(8), loop.create_future()
            self._tell(_SYNC, nonce=nonce)
            await self._within(pause, self._waking)
            if self._synced == nonce:
                return
            if loop.time() >= end:
                await self._replace()

    def kill(self) -> None:
        """Kill the shell and all of its session, and the parent that reports its end: a program may have stopped that one."""
        if self._started and not self._box.ended.done():
            number, parent = self.ready.result(), self._parent
            self._box.processes.signal(
                signal.SIGKILL, lambda process: process.session == number or process.pid == parent
            )

    async def _replace(self) -> None:
        """Kill a shell that does not come back. It has ended, then, whatever the box reports."""
        self.kill()
        await self._within(KILL_SECONDS, self.gone)
        self._end(None)

    def close(self) -> None:
        """Kill it, and close what it was spoken to with. May be called twice."""
        self._box.ended.remove_done_callback(self._box_ended)
        self.kill()
        self._end(None)
        for path in self._paths:
            path.unlink(missing_ok=True)

    async def _within(self, seconds: float, future: "asyncio.Future[T]") -> None:
        with suppress(StallError):
            await self._box.wait(asyncio.shield(future), "stop", seconds)

    async def _in_rounds(self, command: Command, act: Callable[[], None], end: float) -> None:
        """Act until the command has ended, or until `end`: it may start processes while it is being stopped."""
        loop = asyncio.get_running_loop()
        pause, most = ROUND_SECONDS
        while not command.finished.done() and loop.time() < end:
            act()
            await self._within(pause, command.finished)
            pause = min(2 * pause, most)

    def _is_of_command(self, process: Process) -> bool:
        """Whether its group was made since the command began; a command substitution is in the group of the shell."""
        shell, last = self.ready.result(), None if self._command is None else self._command.last
        first = process.pid if process.group == shell else process.group
        return process.session == shell != process.pid and last is not None and first > last

    def _tell(self, lines: str, **names: str) -> None:
        if self._lines >= 0:
            names |= {"reports": f"{CONTROL}/{self._paths[1].name}", "command": f"{CONTROL}/{self._text.name}"}
            with suppress(BlockingIOError):  # it reads no more: the wait for its answer will end it
                os.write(self._lines, lines.format_map(names).encode())

    # --- what it answers ----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        content = os.read(self._reports, CHUNK)
        if not content:
            self._end(None)
            return
        *lines, self._partial = (self._partial + content).split(b"\n")
        self._partial = self._partial[:LONGEST_REPORT]
        for line in lines:
            self._heard(line[:LONGEST_REPORT].decode("ascii", "replace").split())

    def _heard(self, words: list[str]) -> None:
        """Note a report. What is none, or is about a command that is over, is passed over."""
        command = self._command
        match words:
            case ["parent", number] if number.isdigit() and not self._parent:
                self._parent = int(number)
            case ["ready", number] if number.isdigit():
                for pipe in (
                    self._box.room / "keeper",
                    self._paths[0],
                ):  # both are open: nobody else is to read from them
                    pipe.chmod(0)
                succeed(self.ready, int(number))
            case ["begin", nonce, last] if command and nonce == command.nonce and last.isdigit():
                command.last = int(last)
            case ["end", nonce, code] if command and nonce == command.nonce and code.isdigit():
                self._code = int(code)
                succeed(command.finished, self._code)
            case ["sync", nonce] if self._waking is not None:
                self._synced = nonce
                succeed(self._waking, None)
            case ["gone", code] if code.isdigit():
                self._end(int(code))

    def _box_ended(self, _: "asyncio.Future[None]") -> None:
        self._end(None)

    def _end(self, code: int | None) -> None:
        """The shell has ended, and with it whatever it was at."""
        if self._lines >= 0:
            asyncio.get_running_loop().remove_reader(self._reports)
            os.close(self._reports)
            os.close(self._lines)
            self._reports = self._lines = -1
        succeed(self.gone, code)
        fail(self.ready, SandboxError("a shell ended before it was ready"))
        if self._command is not None:
            succeed(self._command.finished, code)
