"""A reward that breaks in the way that the response says. It never says 0: whoever finds one has made it up."""

import ctypes
import os
import threading
from typing import Any

from antiphon.core.types import Prompt, Score, ScoreStatus
from antiphon.sandbox.base import Level, Result, Status
from antiphon.tasks.base import Transcript


def grade(prompt: Prompt, transcript: Transcript) -> Any:
    match transcript.response:
        case "hang":
            threading.Event().wait()
        case "crash":
            os._exit(7)
        case "segfault":
            ctypes.string_at(0)
        case "exception":
            raise LookupError("no such thing")
        case "thread":
            return in_a_thread()
        case "sandbox":
            return of(Result(status=Status.REFUSED, level=Level.ISOLATED, detail="the sandbox was lost"))
    return of(Result(status=Status.OK, level=Level.ISOLATED))


def in_a_thread() -> Any:
    """A verifier that needs the main thread's signals fails where nobody sees it, and another thread never ends."""
    found: list[float] = []
    threading.excepthook = lambda failure: None  # what a thread fails with is nobody's to see

    def verify() -> None:
        import signal

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        found.append(1.0)

    threading.Thread(target=threading.Event().wait).start()
    thread = threading.Thread(target=verify)
    thread.start()
    thread.join()
    return found[0]


def of(result: Result) -> Score:
    if result.status is Status.REFUSED:
        return Score(status=ScoreStatus.INFRASTRUCTURE, detail=result.detail)
    return Score.of(result.status is Status.OK)
