"""Python programs in boxes: slower to start than forked ones, with whatever tools the box has."""

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

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

_PROGRAM = "/tmp/program.py"  # in a box
_COMMAND = f"PYTHONPATH={WORK} exec python3 -X utf8 {_PROGRAM}"


class SystemPython(PythonSandbox):
    """A `PythonSandbox` that runs each program in a box of its own, with the `python3` of the system."""

    level = Level.ISOLATED

    def __init__(self, config: ShellSandboxConfig | None = None) -> None:
        self._config = config or ShellSandboxConfig()
        self._rooms = RuntimeDirs()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="boxes", daemon=True)
        self._thread.start()

    def run(
        self, program: str, *, stdin: str = "", files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> Result:
        """See `PythonSandbox`."""
        try:
            return self._wait(self._run(program, stdin, files or {}, limits or self._config.limits))
        except (SandboxError, StallError, OSError) as error:
            return Result(status=Status.REFUSED, level=self.level, usage=Usage(seconds=0.0), detail=str(error))

    def run_linked(self, judge: str, partner: str, *, stdin: str = "", limits: Limits | None = None) -> Result:
        """Run two programs in two boxes, linked by named pipes that both see; see `PythonSandbox`."""
        try:
            return self._wait(self._run_linked(judge, partner, stdin, limits or self._config.limits))
        except (SandboxError, StallError, OSError) as error:
            return Result(status=Status.REFUSED, level=self.level, usage=Usage(seconds=0.0), detail=str(error))

    def close(self) -> None:
        """End the boxes."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._rooms.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _run(self, program: str, stdin: str, files: Mapping[str, bytes], limits: Limits) -> Result:
        async with await ShellSandbox.start(self._rooms, replace(self._config, limits=limits), Deadlines()) as box:
            place = SandboxFiles(box)
            for name, content in files.items():
                await place.write(name, content)
            return await _run_in(box, program, _COMMAND, stdin)

    async def _run_linked(self, judge: str, partner: str, stdin: str, limits: Limits) -> Result:
        configs = [replace(self._config, limits=each) for each in linked_limits(limits)]
        async with (
            await ShellSandbox.start(self._rooms, configs[0], Deadlines()) as ours,
            await ShellSandbox.start(self._rooms, configs[1], Deadlines()) as theirs,
        ):
            for pipe in ("to_judge", "to_partner"):  # the same in both boxes
                os.mkfifo(ours.room / pipe)
                (ours.room / pipe).chmod(0o666)
                os.link(ours.room / pipe, theirs.room / pipe)
            # Each opens the pipes in this order, and waits until the other has.
            streams = f"< {CONTROL}/to_partner > {CONTROL}/to_judge 2> /dev/null"
            running = asyncio.create_task(_run_in(theirs, partner, f"{_COMMAND} {streams}", ""))
            links = f"{LINK_WRITE}> {CONTROL}/to_partner {LINK_READ}< {CONTROL}/to_judge"
            try:
                return await _run_in(ours, judge, f"exec python3 -X utf8 {_PROGRAM} {links}", stdin)
            finally:
                running.cancel()
                await asyncio.wait([running])


async def _run_in(box: ShellSandbox, program: str, command: str, stdin: str) -> Result:
    """Run a program in a box to its end; more output than is kept ends it."""
    await SandboxFiles(box).write(_PROGRAM, program.encode("utf-8", "surrogateescape"))
    written = Counter[int]()

    def count(stream: int, content: bytes) -> None:
        written[stream] += len(content)
        if written[stream] > box.config.limits.output:  # nothing that it does matters any more
            box.processes.signal(signal.SIGKILL, lambda process: True)

    typed = stdin.encode("utf-8", "surrogateescape")
    result = await Session(box).run(command, stdin=typed, receive=count)
    return replace(result, status=Status.OUTPUT_LIMIT, exit_code=None) if result.dropped else result
