"""What is done in the sandboxes of a service: commands, sessions, files."""

import asyncio
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from antiphon.core.errors import SandboxError, StallError
from antiphon.sandbox.base import Status
from antiphon.sandbox.service.http_errors import Reason, Refused
from antiphon.sandbox.service.manager import Sandboxes
from antiphon.sandbox.service.records import Sandbox, State
from antiphon.sandbox.sessions.session import CommandResult, Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LONGEST_NAME = 128  # characters of a session's name
SETTLE_SECONDS = 0.25  # from the end of a shell until the end of its box is seen, if that was the reason
SPARES = 4  # shells that a sandbox keeps for commands without a session

# Processor time of all processes in clock ticks, resident memory in pages, and how full the work directory is in percent.
_STATISTICS = r"""
cat /proc/[0-9]*/stat 2> /dev/null | sed 's/.*) //' | awk '{t += $12 + $13; m += $22} END {print t, m}'
df --output=pcent /box | tail -1
"""


class Commands:
    """Commands for the sandboxes that run. Whatever is not done is a `Refused`, with the reason."""

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
        """Run a command that leaves nothing to the next: a program and its arguments, or a line for bash."""
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        if not argv:
            raise Refused(Reason.INPUT, "command: it is empty")
        steps = [f"cd -- {shlex.quote(cwd)}"] if cwd else []
        steps += [*_exports(env or {}), f"exec -- {shlex.join(argv)}"]
        script = _text("command", f"( {' && '.join(steps)} )")
        with self._using(sandbox_id) as (sandbox, box):
            session = sandbox.spare.pop() if sandbox.spare else Session(box)
            try:
                return await self._run(sandbox, box, session, script, seconds)
            finally:
                if sandbox.box is box and len(sandbox.spare) < SPARES:
                    sandbox.spare.append(session)
                else:
                    session.close()

    async def create_session(
        self, sandbox_id: str, name: str, *, env: Mapping[str, str] | None = None, sources: Sequence[str] = ()
    ) -> CommandResult:
        """A new shell session, with `env` exported and the files `sources` read."""
        if not 0 < len(_text("session", name)) <= LONGEST_NAME:
            raise Refused(Reason.INPUT, f"session: a name has 1 to {LONGEST_NAME} characters, not {len(name)}")
        steps = [*_exports(env or {}), *(f"source -- {shlex.quote(path)}" for path in sources)]
        script = _text("startup_source", " && ".join(steps) or ":")
        with self._using(sandbox_id) as (sandbox, box):
            if name in sandbox.sessions:
                raise Refused(Reason.STATE, f"sandbox {sandbox_id!r} has a session {name!r} already")
            if len(sandbox.sessions) >= self._config.sessions:
                raise Refused(
                    Reason.QUOTA, f"sandbox {sandbox_id!r} has {self._config.sessions} sessions, and may have no more"
                )
            session = sandbox.sessions[name] = Session(box)
            try:
                result = await self._run(sandbox, box, session, script, None)
            except asyncio.CancelledError:  # who asked for it has gone
                _drop(sandbox, name)
                raise
            if result.exit_code != 0:
                _drop(sandbox, name)
                said = result.raw().decode("utf-8", "replace").strip() or result.detail or result.status
                raise Refused(Reason.FAILED, f"session {name!r} could not be prepared: {said}")
            return result

    async def run(self, sandbox_id: str, name: str, command: str, seconds: float | None = None) -> CommandResult:
        """Run a command in a session; what it changes there lasts."""
        command = _text("command", command)
        with self._using(sandbox_id) as (sandbox, box):
            return await self._run(sandbox, box, _session(sandbox, name), command, seconds)

    async def close_session(self, sandbox_id: str, name: str) -> None:
        """End a session and what runs in it."""
        with self._using(sandbox_id) as (sandbox, _):
            _session(sandbox, name)
            _drop(sandbox, name)

    async def read(self, sandbox_id: str, path: str) -> bytes:
        """What a file contains."""
        with self._using(sandbox_id) as (sandbox, _), _explained(Reason.UNKNOWN):
            assert sandbox.files is not None
            return await sandbox.files.read(_path(path), self._config.upload << 20)

    async def write(self, sandbox_id: str, path: str, content: bytes) -> None:
        """Write a file, and the directories it lies in."""
        with self._using(sandbox_id) as (sandbox, _), _explained(Reason.FAILED):
            assert sandbox.files is not None
            await sandbox.files.write(_path(path), content)

    async def statistics(self, sandbox_id: str) -> dict[str, float]:
        """What a sandbox uses: processor time in seconds, memory in bytes, its work directory in percent."""
        result = await self.execute(sandbox_id, _STATISTICS)
        try:
            ticks, pages, full = result.stdout.replace("%", "").split()
            return {"cpu_seconds": float(ticks) / 100, "memory_bytes": float(pages) * 4096, "disk": float(full)}
        except ValueError:
            raise Refused(Reason.FAILED, f"sandbox {sandbox_id!r} does not tell what it uses") from None

    @contextmanager
    def _using(self, sandbox_id: str) -> Iterator[tuple[Sandbox, ShellSandbox]]:
        """A sandbox that runs, for one command. If it ends under it, that is why the command has no result."""
        sandbox = self._sandboxes.get(sandbox_id)
        box = sandbox.box
        if sandbox.state is not State.RUNNING or box is None:
            why = f": {sandbox.failure}" if sandbox.failure else ""
            raise Refused(Reason.STATE, f"sandbox {sandbox_id!r} is {sandbox.state}{why}")
        if self.busy >= self._config.commands:
            raise Refused(
                Reason.QUOTA, f"{self.busy} commands are under way, which is all there may be; ask again later"
            )
        if sandbox.busy >= self._config.sandbox_commands:
            raise Refused(
                Reason.QUOTA,
                f"{sandbox.busy} commands are under way in sandbox {sandbox_id!r}, and there may be no more",
            )
        self.busy += 1
        sandbox.busy += 1
        sandbox.commands += 1
        try:
            yield sandbox, box
        except (SandboxError, StallError, OSError) as error:
            if _lost(sandbox, box):
                raise Refused(Reason.LOST, f"sandbox {sandbox_id!r} ended before this was done") from error
            if isinstance(error, Refused):
                raise
            raise Refused(Reason.LOST, f"sandbox {sandbox_id!r} does not answer: {error}") from error
        finally:
            self.busy -= 1
            sandbox.busy -= 1
            sandbox.used = self._sandboxes.now()

    async def _run(
        self, sandbox: Sandbox, box: ShellSandbox, session: Session, command: str, seconds: float | None
    ) -> CommandResult:
        most = self._config.command_seconds
        result = await session.run(command, seconds=most if seconds is None else min(seconds, most))
        if result.ended and result.status is Status.KILLED:  # the shell alone, or all of it?
            with suppress(StallError):
                await box.wait(asyncio.shield(box.ended), "end", SETTLE_SECONDS)
            if _lost(sandbox, box):
                raise SandboxError("the box has ended")
        self._sandboxes.metrics.count("antiphon_sandbox_commands", status=result.status.value)
        self._sandboxes.metrics.observe("antiphon_sandbox_command_seconds", result.usage.seconds)
        return result


def _lost(sandbox: Sandbox, box: ShellSandbox) -> bool:
    return box.ended.done() or sandbox.box is not box or sandbox.state is not State.RUNNING


def _session(sandbox: Sandbox, name: str) -> Session:
    if name not in sandbox.sessions:
        raise Refused(Reason.UNKNOWN, f"sandbox {sandbox.id!r} has no session {name!r}; create it first")
    return sandbox.sessions[name]


def _drop(sandbox: Sandbox, name: str) -> None:
    session = sandbox.sessions.pop(name, None)
    if session is not None:
        session.close()


@contextmanager
def _explained(reason: Reason) -> Iterator[None]:
    """What a sandbox could not do is not what a client did wrong, nor is it lost."""
    try:
        yield
    except SandboxError as error:
        raise error if isinstance(error, Refused) else Refused(reason, str(error)) from error


def _exports(env: Mapping[str, str]) -> list[str]:
    wrong = next((name for name in env if not VARIABLE.fullmatch(name)), None)
    if wrong is not None:
        raise Refused(Reason.INPUT, f"env: {wrong!r} is no name of a variable; it must match {VARIABLE.pattern}")
    return [f"export {name}={shlex.quote(value)}" for name, value in env.items()]


def _text(field: str, value: str) -> str:
    """`value`, if bash can be given it."""
    if "\0" in value:
        raise Refused(Reason.INPUT, f"{field}: it contains a NUL character, which bash cannot be given")
    return value


def _path(path: str) -> str:
    if not _text("path", path):
        raise Refused(Reason.INPUT, "path: it is empty")
    return path
