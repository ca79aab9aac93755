"""Child processes as their parent sees them: start, signals, notice of the end and its reason."""

import asyncio
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any


class Child:
    """A child process, however it was started."""

    def __init__(self, end: "Future[int | None]", send_signal: Callable[[int], object]) -> None:
        """Supervise a process.

        Args:
            end: Completed with the process's exit code, or with None if it cannot be known, once the process has ended.
            send_signal: Sends a signal; raises `OSError` if nothing is left to send it to.
        """
        self._end = end
        self._send_signal = send_signal

    @property
    def has_ended(self) -> bool:
        """True once the process has ended, and was reaped."""
        return self._end.done()

    @property
    def exit_code(self) -> int | None:
        """The exit code, a signal as a negative number; None if the process still runs or the code cannot be known."""
        return self._end.result() if self._end.done() else None

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end, at most `seconds`; return True if the process has ended."""
        await asyncio.wait([asyncio.wrap_future(self._end)], timeout=seconds)
        return self.has_ended

    def join(self, seconds: float | None = None) -> None:
        """Block until the process has ended.

        Raises:
            TimeoutError: It runs for longer than `seconds`.
        """
        self._end.result(seconds)

    def terminate(self) -> None:
        """Ask the process to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process; if it leads a session, also what it started there, even after its own end."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(OSError):  # it has ended
            self._send_signal(number)


def start_child(
    command: Collection[str],
    *,
    descriptors: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
    stdout: IO[bytes] | None = None,
    stderr: IO[bytes] | None = None,
    own_session: bool = False,
) -> Child:
    """Start a command without input.

    Args:
        command: The program and its arguments.
        descriptors: Descriptors that it inherits.
        environment: Its environment; None for this process's.
        stdout: File for its output; None for this process's.
        stderr: File for its errors; None for this process's.
        own_session: Lead a session: Ctrl-C does not reach it, and signals go to all processes of its group.

    Raises:
        OSError: The program cannot be run.
    """
    process = subprocess.Popen(
        [*command],
        pass_fds=descriptors,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=own_session,
    )
    end = Future[int | None]()
    end.set_running_or_notify_cancel()  # nobody who waits can cancel it
    threading.Thread(target=lambda: end.set_result(process.wait()), name=f"wait-{process.pid}", daemon=True).start()
    return Child(end, (lambda number: os.killpg(process.pid, number)) if own_session else process.send_signal)


def start_python(
    entry: str,
    *args: Any,
    descriptors: Collection[int],
    python: str = "",
    prelude: str = "",
    output: IO[bytes] | None = None,
    own_session: bool = False,
) -> Child:
    """Start a Python process that calls a function of a module, with the import path of this process.

    Args:
        entry: The function, `package.module:function`.
        args: Arguments of the function, as literals. They are on the command line, which every user can read.
        descriptors: Descriptors that it inherits.
        python: Another interpreter, which brings its own packages; empty for this one.
        prelude: Statements that it executes before it imports the module; each ends with a semicolon.
        output: File for what it prints; None for this process's output.
        own_session: Lead a session.

    Raises:
        OSError: The interpreter cannot be run.
    """
    path = f"sys.path + {_project_folders()!r}" if python else repr(sys.path)
    module, _, function = entry.partition(":")
    call = f"{function}({', '.join(map(repr, args))})"
    program = f"import sys; sys.path[:] = {path}; {prelude}from {module} import {function}; {call}"
    return start_child(
        [python or sys.executable, "-u", "-c", program],
        descriptors=descriptors,
        stdout=output,
        stderr=output,
        own_session=own_session,
    )


def describe_exit(code: int | None) -> str:
    """Describe an exit code as the end of a sentence about the process."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else "a signal"
    return f"was killed by {name} (signal {-code})"


def _project_folders() -> list[str]:
    """Return the import path without installed packages, which another interpreter cannot use."""
    standard = sysconfig.get_path("stdlib")
    folders = dict.fromkeys(Path(folder).absolute() for folder in sys.path)
    return [
        str(folder)
        for folder in folders
        if folder.is_dir()
        and not folder.is_relative_to(standard)
        and not {"site-packages", "dist-packages"} & {*folder.parts}
    ]
