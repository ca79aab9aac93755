"""Commands, sessions and files in the sandboxes of a service."""

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

from antiphon.core.errors import SandboxError, StallError
from antiphon.sandbox.base import Status
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.manager import Sandboxes
from antiphon.sandbox.service.quotas import check_under_way
from antiphon.sandbox.service.records import Sandbox, State
from antiphon.sandbox.service.terminals import Reply, Terminal, compile_patterns
from antiphon.sandbox.sessions.session import CommandResult, Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox
from antiphon.sandbox.sessions.streams import ProgramStream, connect_to_port

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LONGEST_NAME = 128  # characters of a session's name
SETTLE_SECONDS = 0.25  # from the end of a shell until the end of its sandbox is seen, if that was the cause
SPARES = 4  # shells that a sandbox keeps ready for commands without a session

# Processor time of all processes in clock ticks, resident memory in pages, and use of the work directory in percent.
_STATISTICS = r"""
cat /proc/[0-9]*/stat 2> /dev/null | sed 's/.*) //' | awk '{t += $12 + $13; m += $22} END {print t, m}'
df --output=pcent /box | tail -1
"""


class Commands:
    """Runs commands in running sandboxes. A command that cannot be run raises `RefusedError` with the reason."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._config = sandboxes.config
        self.busy = 0

    async def execute(
        self,
        sandbox_id: str,
        command: str | Sequence[str],
        *,
        seconds: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command in a shell state of its own.

        Args:
            sandbox_id: The sandbox.
            command: A line for bash, or a program and its arguments.
            seconds: Deadline of the command.
            cwd: Directory to run it in.
            env: Variables to export.
        """
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        if not argv:
            raise RefusedError(Reason.INPUT, "command: must not be empty")
        steps = [f"cd -- {shlex.quote(cwd)}"] if cwd else []
        steps += [*_export_commands(env or {}), f"exec -- {shlex.join(argv)}"]
        script = _check_text("command", f"( {' && '.join(steps)} )")
        with self._using(sandbox_id) as (sandbox, backend):
            session = sandbox.spare.pop() if sandbox.spare else Session(backend)
            try:
                return await self._run(sandbox, backend, session, script, seconds)
            finally:
                if sandbox.backend is backend and len(sandbox.spare) < SPARES:
                    sandbox.spare.append(session)
                else:
                    session.close()

    async def create_session(
        self, sandbox_id: str, name: str, *, env: Mapping[str, str] | None = None, sources: Sequence[str] = ()
    ) -> CommandResult:
        """Create a shell session with `env` exported and the files `sources` sourced."""
        if not 0 < len(_check_text("session", name)) <= LONGEST_NAME:
            raise RefusedError(
                Reason.INPUT, f"session: a name must have 1 to {LONGEST_NAME} characters, not {len(name)}"
            )
        steps = [*_export_commands(env or {}), *(f"source -- {shlex.quote(path)}" for path in sources)]
        script = _check_text("startup_source", " && ".join(steps) or ":")
        with self._using(sandbox_id) as (sandbox, backend):
            if name in sandbox.sessions:
                raise RefusedError(Reason.STATE, f"sandbox {sandbox_id!r} already has a session {name!r}")
            if len(sandbox.sessions) >= self._config.sessions:
                raise RefusedError(
                    Reason.QUOTA,
                    f"sandbox {sandbox_id!r} has {self._config.sessions} sessions, which is the limit (sessions)",
                )
            session = sandbox.sessions[name] = Session(backend)
            try:
                result = await self._run(sandbox, backend, session, script, None)
            except asyncio.CancelledError:  # the client has disconnected
                _close_session(sandbox, name)
                raise
            if result.exit_code != 0:
                _close_session(sandbox, name)
                output = result.raw().decode("utf-8", "replace").strip() or result.detail or result.status
                raise RefusedError(Reason.FAILED, f"session {name!r} could not be prepared: {output}")
            return result

    async def run(self, sandbox_id: str, name: str, command: str, seconds: float | None = None) -> CommandResult:
        """Run a command in a session. Its changes to the shell's state persist."""
        command = _check_text("command", command)
        with self._using(sandbox_id) as (sandbox, backend):
            session = _get_session(sandbox, name)
            if _get_terminal(sandbox, name) is not None:
                raise RefusedError(Reason.STATE, f"a program runs in the terminal of session {name!r}; quit it first")
            return await self._run(sandbox, backend, session, command, seconds)

    async def interact(
        self, sandbox_id: str, name: str, line: str, patterns: Sequence[str], seconds: float | None, *, quits: bool
    ) -> Reply:
        """Send a line to the program in the terminal of a session, and wait for what it says.

        Args:
            sandbox_id: The sandbox.
            name: The session.
            line: The line; if no program runs, the command that starts one.
            patterns: Regular expressions, one of which ends the wait; so does the end of the program.
            seconds: Time limit.
            quits: The line is to end the program, so that one must run.
        """
        line, most, wanted = _check_text("command", line), self._config.command_seconds, compile_patterns(patterns)
        with self._using(sandbox_id) as (sandbox, backend):
            session, terminal = _get_session(sandbox, name), _get_terminal(sandbox, name)
            said = None if terminal is None else line
            if terminal is None:
                if quits:
                    raise RefusedError(Reason.STATE, f"no program runs in the terminal of session {name!r}")
                keep = self._config.output << 10
                terminal = sandbox.terminals[name] = Terminal(backend, session, line, most, keep)
            reply = await terminal.talk(said, wanted, most if seconds is None else min(seconds, most))
            if reply.ended and _is_lost(sandbox, backend):
                raise SandboxError("the sandbox has ended")
            return reply

    async def close_session(self, sandbox_id: str, name: str) -> None:
        """End a session and everything that runs in it."""
        with self._using(sandbox_id) as (sandbox, _):
            _get_session(sandbox, name)
            _close_session(sandbox, name)

    @asynccontextmanager
    async def connect(self, sandbox_id: str, port: int) -> AsyncIterator[ProgramStream]:
        """Connect to a port of a sandbox for as long as the block runs. It counts as a command."""
        with self._using(sandbox_id) as (_, backend), _refuse_errors_as(Reason.FAILED):
            async with connect_to_port(backend, port, self._config.command_seconds) as stream:
                yield stream

    async def read(self, sandbox_id: str, path: str) -> bytes:
        """Return the content of a file."""
        with self._using(sandbox_id) as (sandbox, _), _refuse_errors_as(Reason.UNKNOWN):
            assert sandbox.files is not None
            return await sandbox.files.read(_check_path(path), self._config.upload << 20)

    async def write(self, sandbox_id: str, path: str, content: bytes) -> None:
        """Write a file, and create its parent directories."""
        with self._using(sandbox_id) as (sandbox, _), _refuse_errors_as(Reason.FAILED):
            assert sandbox.files is not None
            await sandbox.files.write(_check_path(path), content)

    async def statistics(self, sandbox_id: str) -> dict[str, float]:
        """Return what a sandbox uses: processor time in seconds, memory in bytes, work directory in percent."""
        result = await self.execute(sandbox_id, _STATISTICS)
        try:
            ticks, pages, full = result.stdout.replace("%", "").split()
            return {"cpu_seconds": float(ticks) / 100, "memory_bytes": float(pages) * 4096, "disk": float(full)}
        except ValueError:
            raise RefusedError(Reason.FAILED, f"sandbox {sandbox_id!r} does not report what it uses") from None

    @contextmanager
    def _using(self, sandbox_id: str) -> Iterator[tuple[Sandbox, ShellSandbox]]:
        """Yield a running sandbox for one command. If the sandbox ends meanwhile, raise `RefusedError` (LOST)."""
        sandbox = self._sandboxes.get(sandbox_id)
        backend = sandbox.backend
        if sandbox.state is not State.RUNNING or backend is None:
            cause = f": {sandbox.failure}" if sandbox.failure else ""
            raise RefusedError(Reason.STATE, f"sandbox {sandbox_id!r} is {sandbox.state}{cause}")
        check_under_way("commands", self.busy, self._config.commands)
        if sandbox.busy >= self._config.sandbox_commands:
            raise RefusedError(
                Reason.QUOTA,
                f"{sandbox.busy} commands are under way in sandbox {sandbox_id!r}, which is the limit (sandbox_commands)",
            )
        self.busy += 1
        sandbox.busy += 1
        sandbox.commands += 1
        try:
            yield sandbox, backend
        except (SandboxError, StallError, OSError) as error:
            if _is_lost(sandbox, backend):
                raise RefusedError(Reason.LOST, f"sandbox {sandbox_id!r} ended before this was done") from error
            if isinstance(error, RefusedError):
                raise
            raise RefusedError(Reason.LOST, f"sandbox {sandbox_id!r} does not answer: {error}") from error
        finally:
            self.busy -= 1
            sandbox.busy -= 1
            sandbox.used = self._sandboxes.now()

    async def _run(
        self, sandbox: Sandbox, backend: ShellSandbox, session: Session, command: str, seconds: float | None
    ) -> CommandResult:
        most = self._config.command_seconds
        result = await session.run(command, seconds=most if seconds is None else min(seconds, most))
        if result.ended and result.status is Status.KILLED:  # did only the shell end, or the whole sandbox?
            with suppress(StallError):
                await backend.wait(asyncio.shield(backend.ended), "end", SETTLE_SECONDS)
            if _is_lost(sandbox, backend):
                raise SandboxError("the sandbox has ended")
        self._sandboxes.metrics.count("antiphon_sandbox_commands", status=result.status.value)
        self._sandboxes.metrics.observe("antiphon_sandbox_command_seconds", result.usage.seconds)
        return result


def _is_lost(sandbox: Sandbox, backend: ShellSandbox) -> bool:
    return backend.ended.done() or sandbox.backend is not backend or sandbox.state is not State.RUNNING


def _get_session(sandbox: Sandbox, name: str) -> Session:
    if name not in sandbox.sessions:
        raise RefusedError(Reason.UNKNOWN, f"sandbox {sandbox.id!r} has no session {name!r}; create it first")
    return sandbox.sessions[name]


def _get_terminal(sandbox: Sandbox, name: str) -> Terminal | None:
    """Return the terminal of a session in which a program runs, if any."""
    terminal = sandbox.terminals.get(name)
    return None if terminal is None or terminal.ended else terminal


def _close_session(sandbox: Sandbox, name: str) -> None:
    session = sandbox.sessions.pop(name, None)
    sandbox.terminals.pop(name, None)  # whose program ends with the session
    if session is not None:
        session.close()


@contextmanager
def _refuse_errors_as(reason: Reason) -> Iterator[None]:
    """Turn a failure inside a sandbox into a refusal with this reason."""
    try:
        yield
    except SandboxError as error:
        raise error if isinstance(error, RefusedError) else RefusedError(reason, str(error)) from error


def _export_commands(env: Mapping[str, str]) -> list[str]:
    invalid = next((name for name in env if not VARIABLE.fullmatch(name)), None)
    if invalid is not None:
        raise RefusedError(
            Reason.INPUT, f"env: {invalid!r} is not a valid variable name; it must match {VARIABLE.pattern}"
        )
    return [f"export {name}={shlex.quote(value)}" for name, value in env.items()]


def _check_text(field: str, value: str) -> str:
    """Return `value`; refuse it if it holds a character that bash cannot take."""
    if "\0" in value:
        raise RefusedError(Reason.INPUT, f"{field}: must not contain a NUL character")
    return value


def _check_path(path: str) -> str:
    if not _check_text("path", path):
        raise RefusedError(Reason.INPUT, "path: must not be empty")
    return path
