"""Python programs in boxes: slower to start than forked ones, with whatever tools the box has."""

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from antiphon.errors import SandboxError, StallError
from antiphon.sandbox.base import Level, Limits, PythonSandbox, Result, Status, Usage
from antiphon.sandbox.box import Box
from antiphon.sandbox.box_config import WORK, BoxConfig
from antiphon.sandbox.files import Files
from antiphon.sandbox.rooms import Rooms
from antiphon.sandbox.session import Session
from antiphon.waits import Waits

T = TypeVar("T")


class BoxedPython(PythonSandbox):
    """A `PythonSandbox` that runs each program in a box of its own, with the `python3` of the system."""

    level = Level.ISOLATED

    def __init__(self, config: BoxConfig | None = None) -> None:
        self._config = config or BoxConfig()
        self._rooms = Rooms()
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

    def close(self) -> None:
        """End the boxes."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._rooms.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _run(self, program: str, stdin: str, files: Mapping[str, bytes], limits: Limits) -> Result:
        async with await Box.start(self._rooms, replace(self._config, limits=limits), Waits()) as box:
            place = Files(box)
            for name, content in files.items():
                await place.write(name, content)
            await place.write("/tmp/program.py", program.encode("utf-8", "surrogateescape"))
            written = Counter[int]()

            def count(stream: int, content: bytes) -> None:
                written[stream] += len(content)
                if written[stream] > limits.output:  # nothing that it does matters any more
                    box.processes.signal(signal.SIGKILL, lambda process: True)

            command = f"PYTHONPATH={WORK} exec python3 -X utf8 /tmp/program.py"
            typed = stdin.encode("utf-8", "surrogateescape")
            result = await Session(box).run(command, stdin=typed, receive=count)
            return replace(result, status=Status.OUTPUT_LIMIT, exit_code=None) if result.dropped else result
