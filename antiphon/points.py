"""Named points at which a test can kill a process, to see that nothing is lost: before and after every write, publish and
commit. Reaching one costs a comparison; nothing happens unless a test has armed it in this very process."""

import os
import signal
from collections import Counter

_armed = ""
_at = 0
_reached: Counter[str] = Counter()


def arm(point: str, count: int = 1) -> None:
    """Let this process die of SIGKILL when it reaches `point` for the `count`-th time."""
    global _armed, _at
    _armed, _at = point, count


def reach(point: str) -> None:
    """Say that the process is at a point."""
    if _armed != point:
        return
    _reached[point] += 1
    if _reached[point] == _at:
        os.kill(os.getpid(), signal.SIGKILL)
