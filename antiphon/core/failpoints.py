"""Named points at which a test can kill or inspect a process: before and after every write, publish and commit.

Reaching one costs a comparison; nothing happens unless a test has armed it in this very process.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

Look = Callable[[str, Path | None], None]

_look: Look | None = None


def arm(point: str, count: int = 1) -> None:
    """Let this process die of SIGKILL when it reaches `point` for the `count`-th time."""
    left = count

    def kill(reached: str, path: Path | None) -> None:
        nonlocal left
        left -= reached == point
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(kill)


def watch(look: Look | None) -> None:
    """Call `look` with every point that is reached, and the path that it is about; None ends that."""
    global _look
    _look = look


def hit(point: str, path: Path | None = None) -> None:
    """Say that the process is at a point."""
    if _look is not None:
        _look(point, path)
