"""Python programs in shell sandboxes: slower to start than forked processes, but with the sandbox's commands."""

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from typing_extensions import override

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import SandboxError, StallError
from antiphon.sandbox.base import (
    LINK_READ,
    LINK_WRITE,
    Level,
    Limits,
    PythonSandbox,
    Result,
    Status,
    Usage,
    linked_limits,
)
from antiphon.sandbox.sessions.config import CONTROL, WORK, ShellSandboxConfig
from antiphon.sandbox.sessions.files import SandboxFiles
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

T = TypeVar("T")

_PROGRAM = "/tmp/program.py"  # path in the sandbox
_COMMAND = f"PYTHONPATH={WORK} exec python3 -X utf8 {_PROGRAM}"


class SystemPython(PythonSandbox):
    """A `PythonSandbox` that runs each program in a shell sandbox of its own, with the `python3` of the system or image."""

    level = Level.ISOLATED

    def __init__(self, config: ShellSandboxConfig | None = None) -> None:
        self._config = config or ShellSandboxConfig()
        self._runtime_dirs = RuntimeDirs()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shell-sandboxes", daemon=True)
        self._thread.start()

    @override
    def run(
        self, program: str, *, stdin: str = "", files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> Result:
        """Run `program` with `python3` in a new shell sandbox."""
        try:
            return self._wait(self._run(program, stdin, files or {}, limits or self._config.limits))
        except (SandboxError, StallError, OSError) as error:
            return Result(status=Status.REFUSED, level=self.level, usage=Usage(seconds=0.0), detail=str(error))

    @override
    def run_linked(self, judge: str, partner: str, *, stdin: str = "", limits: Limits | None = None) -> Result:
        """Run two programs in two sandboxes, linked by named pipes that both see."""
        try:
            return self._wait(self._run_linked(judge, partner, stdin, limits or self._config.limits))
        except (SandboxError, StallError, OSError) as error:
            return Result(status=Status.REFUSED, level=self.level, usage=Usage(seconds=0.0), detail=str(error))

    @override
    def close(self) -> None:
        """End all sandboxes."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._runtime_dirs.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _run(self, program: str, stdin: str, files: Mapping[str, bytes], limits: Limits) -> Result:
        async with await ShellSandbox.start(
            self._runtime_dirs, replace(self._config, limits=limits), Deadlines()
        ) as sandbox:
            sandbox_files = SandboxFiles(sandbox)
            for name, content in files.items():
                await sandbox_files.write(name, content)
            return await _run_in(sandbox, program, _COMMAND, stdin)

    async def _run_linked(self, judge: str, partner: str, stdin: str, limits: Limits) -> Result:
        configs = [replace(self._config, limits=each) for each in linked_limits(limits)]
        async with (
            await ShellSandbox.start(self._runtime_dirs, configs[0], Deadlines()) as ours,
            await ShellSandbox.start(self._runtime_dirs, configs[1], Deadlines()) as theirs,
        ):
            for pipe in ("to_judge", "to_partner"):  # the same pipes in both sandboxes
                os.mkfifo(ours.directory / pipe)
                (ours.directory / pipe).chmod(0o666)
                os.link(ours.directory / pipe, theirs.directory / pipe)
            # Each side opens the pipes in this order, and waits for the other.
            streams = f"< {CONTROL}/to_partner > {CONTROL}/to_judge 2> /dev/null"
            running = asyncio.create_task(_run_in(theirs, partner, f"{_COMMAND} {streams}", ""))
            links = f"{LINK_WRITE}> {CONTROL}/to_partner {LINK_READ}< {CONTROL}/to_judge"
            try:
                return await _run_in(ours, judge, f"exec python3 -X utf8 {_PROGRAM} {links}", stdin)
            finally:
                running.cancel()
                await asyncio.wait([running])


async def _run_in(sandbox: ShellSandbox, program: str, command: str, stdin: str) -> Result:
    """Run a program in a sandbox to its end; kill it if it writes more output than it may."""
    await SandboxFiles(sandbox).write(_PROGRAM, program.encode("utf-8", "surrogateescape"))
    written = Counter[int]()

    def count(stream: int, content: bytes) -> None:
        written[stream] += len(content)
        if written[stream] > sandbox.config.limits.output:  # its result is decided
            sandbox.processes.signal(signal.SIGKILL, lambda process: True)

    standard_input = stdin.encode("utf-8", "surrogateescape")
    result = await Session(sandbox).run(command, stdin=standard_input, receive=count)
    return replace(result, status=Status.OUTPUT_LIMIT, exit_code=None) if result.dropped else result
