"""Programs of a shell sandbox that are talked to: what listens at its TCP ports, and what runs in a terminal.

A sandbox has no network but its own loopback, and nothing outside connects to anything inside. A program inside, started as a
command of a session and bounded as such, reads one named pipe that the controller created and writes another.
"""

import asyncio
import os
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass

from antiphon.core.deadlines import succeed
from antiphon.core.errors import SandboxError
from antiphon.sandbox.sessions.command import STDOUT
from antiphon.sandbox.sessions.config import CONTROL
from antiphon.sandbox.sessions.pipe_reader import CHUNK
from antiphon.sandbox.sessions.session import CommandResult, Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

MOST_ERROR = 1 << 12  # bytes of an error message of the program inside
OPEN_SECONDS = 10.0  # for the program at a port to take a connection
SEND_SECONDS = 120.0  # for a program to read what it is sent, or a part of it
LAST_SECONDS = 1.0  # for what is still in a pipe to be read, once the program that it goes to, or comes from, has ended

# Each is a subshell that says on its standard output when its pipes are open.
# A connection needs nothing but bash and cat, which every sandbox has. It ends as soon as the other side closes it.
_CONNECT = """(
exec 3<>/dev/tcp/127.0.0.1/{port} || exit
exec 4<{to} 5>{back}
echo
cat <&3 >&5 4<&- &
exec 5>&-
exec cat <&4 >&3
)"""
_TERMINAL = """(
exec 4<{to} 5>{back}
echo
exec script --quiet --return --flush --command {command} /dev/null <&4 >&5 2>&5
)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramStream:
    """The input and output of a program that runs."""

    running: "asyncio.Task[CommandResult]"
    """The command; its result has the exit code."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    close_input: Callable[[], None]
    """Closes what keeps its input open."""

    async def receive(self) -> bytes:
        """Return what the program has written, as soon as it has; nothing once it writes no more."""
        return await self.reader.read(CHUNK)

    async def send(self, content: bytes) -> None:
        """Send to the program; raise `OSError` if it reads no more, or nothing in `SEND_SECONDS`."""
        for begin in range(0, len(content), CHUNK):
            self.writer.write(content[begin : begin + CHUNK])
            async with asyncio.timeout(SEND_SECONDS):  # whose error is an `OSError`
                await self.writer.drain()

    async def finish(self) -> None:
        """Let the program read what it has been sent, and then the end of its input."""
        self.writer.close()
        self.close_input()
        await asyncio.wait([self.running], timeout=LAST_SECONDS)


@asynccontextmanager
async def connect_to_port(sandbox: ShellSandbox, port: int, seconds: float) -> AsyncIterator[ProgramStream]:
    """Connect to a TCP port of a sandbox for as long as the block runs, at most `seconds`.

    Raises:
        SandboxError: Nothing listens at the port, or the sandbox is lost.
    """
    async with AsyncExitStack() as stack:
        session = Session(sandbox)
        stack.callback(session.close)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                stream = await stack.enter_async_context(_start(sandbox, session, seconds, _CONNECT, port=str(port)))
        except TimeoutError:
            message = f"port {port}: the program that listens there takes no connection in {OPEN_SECONDS:g} s"
            raise SandboxError(message) from None
        if stream is None:
            raise SandboxError(f"port {port}: nothing in the sandbox listens there")
        yield stream
        await stream.finish()


@asynccontextmanager
async def run_in_terminal(
    sandbox: ShellSandbox, session: Session, command: str, seconds: float
) -> AsyncIterator[ProgramStream]:
    """Run a command in a terminal of its own, with directory and variables of a session. It ends with the block.

    Raises:
        SandboxError: The sandbox is lost.
    """
    async with _start(sandbox, session, seconds, _TERMINAL, command=shlex.quote(command)) as stream:
        if stream is None:
            raise SandboxError("the session has ended before the command could run")
        yield stream


@asynccontextmanager
async def _start(
    sandbox: ShellSandbox, session: Session, seconds: float, program: str, **fields: str
) -> AsyncIterator[ProgramStream | None]:
    """Start a program; yield None if it ended before it opened its pipes."""
    loop, name = asyncio.get_running_loop(), sandbox.new_name()
    to, back = [sandbox.directory / f"{name}.{way}" for way in ("to", "back")]
    opened: asyncio.Future[bool] = loop.create_future()

    def note(stream: int, _: bytes) -> None:
        if stream == STDOUT:
            succeed(opened, True)

    async with AsyncExitStack() as stack:
        for path, mode in ((to, 0o644), (back, 0o622)):
            os.mkfifo(path)
            stack.callback(path.unlink, missing_ok=True)
            path.chmod(mode)
        # So that the program does not wait for a writer.
        kept_open = ExitStack()
        kept_open.callback(os.close, os.open(to, os.O_RDWR | os.O_NONBLOCK))
        stack.enter_context(kept_open)
        reader = asyncio.StreamReader()
        incoming = os.fdopen(os.open(back, os.O_RDONLY | os.O_NONBLOCK), "rb", 0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), incoming)
        stack.callback(transport.close)
        text = program.format(to=f"{CONTROL}/{to.name}", back=f"{CONTROL}/{back.name}", **fields)
        running = loop.create_task(session.run(text, seconds=seconds, output=MOST_ERROR, receive=note))
        running.add_done_callback(lambda _: succeed(opened, False))
        # Another process may have opened the pipe, and would keep it open.
        running.add_done_callback(lambda _: loop.call_later(LAST_SECONDS, transport.close))
        stack.push_async_callback(_cancel, running)
        if not await opened:
            await running  # raises if the sandbox is lost
            yield None
            return
        outgoing = os.fdopen(os.open(to, os.O_WRONLY | os.O_NONBLOCK), "wb", 0)
        pipe, protocol = await loop.connect_write_pipe(_Outgoing, outgoing)
        stack.callback(protocol.abort)
        writer = asyncio.StreamWriter(pipe, protocol, None, loop)
        yield ProgramStream(running=running, reader=reader, writer=writer, close_input=kept_open.close)


class _Outgoing(asyncio.streams.FlowControlMixin):
    """The protocol of a pipe that is written to."""

    _pipe: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the pipe."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._pipe = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the pipe, which is closed."""
        super().connection_lost(exc)
        self._pipe = None

    def abort(self) -> None:
        """Close the pipe at once, if it is not closed."""
        if self._pipe is not None:
            self._pipe.abort()


async def _cancel(task: "asyncio.Task[CommandResult]") -> None:
    task.cancel()
    await asyncio.wait([task])
