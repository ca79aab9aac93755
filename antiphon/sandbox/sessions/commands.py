"""Commands in a shell sandbox of this machine, each in a session of its own."""

import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import SandboxError
from antiphon.sandbox.base import CommandSandbox, Execution
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.files import SandboxFiles
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox


@asynccontextmanager
async def open_local_sandbox(
    runtime_dirs: RuntimeDirs, config: ShellSandboxConfig, deadlines: Deadlines
) -> AsyncIterator[CommandSandbox]:
    """Open a sandbox of this machine for as long as the block runs; raises what `ShellSandbox.start` raises."""
    async with await ShellSandbox.start(runtime_dirs, config, deadlines) as sandbox:
        commands = _LocalCommands(sandbox)
        try:
            yield commands
        finally:
            commands.close()


class _LocalCommands(CommandSandbox):
    def __init__(self, sandbox: ShellSandbox) -> None:
        self._sandbox = sandbox
        self._files = SandboxFiles(sandbox)
        self._sessions: list[Session] = []
        self._idle: list[Session] = []

    async def execute(self, command: Sequence[str], seconds: float) -> Execution:
        """Run a command in an idle session, or in a new one."""
        if not self._idle:
            self._idle.append(Session(self._sandbox))
            self._sessions.append(self._idle[-1])
        session = self._idle.pop()
        result = await session.run(shlex.join(command), seconds=seconds)
        self._idle.append(session)
        if result.exit_code is None:
            raise SandboxError(f"{command[0]} in the sandbox: {result.status}: {result.detail}")
        return Execution(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)

    async def write(self, path: str, content: str) -> None:
        await self._files.write(path, content.encode("ascii"))

    def close(self) -> None:
        """End all sessions."""
        self._files.close()
        for session in self._sessions:
            session.close()
