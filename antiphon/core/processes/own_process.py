"""Settings that a child process makes for itself. Imports the standard library alone."""

import atexit
import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn


def die_with_parent(parent: int | None = None) -> None:
    """On Linux, have the kernel kill this process when the thread that started it ends, even while it hangs.

    Args:
        parent: Process id of the parent; if it has ended already, this process ends at once. None if it is not known.

    Raises:
        OSError: The kernel refuses.
    """
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(set_parent_death_signal, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl parent death signal")
    if parent is not None and os.getppid() not in (parent, 0):  # 0 is a parent outside a namespace of process ids
        os._exit(1)


def end_process() -> NoReturn:
    """End this process once its threads have ended and its exit functions have run, as `multiprocessing` ends its own.

    The interpreter is not finalized. A destructor of a library may ask for it after its end, which ends the main thread alone:
    the others, and so the process, would run for ever.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it
            stream.flush()
    os._exit(0)


def redirect_output(descriptor: int) -> None:
    """Send what this process prints to an open file."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())


def open_log(path: Path) -> IO[bytes]:
    """Open a file, and make its folder, to append what a process prints."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")
