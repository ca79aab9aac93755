"""Rewards that do to a grading process what model output does. The prompt's payload says which."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any

from antiphon.core.types import Prompt, Score, ScoreStatus
from antiphon.tasks.base import Transcript


def obey(prompt: Prompt, transcript: Transcript) -> Any:
    match prompt.payload:
        case "spin":
            while True:
                pass
        case "raise":
            raise LookupError("no such thing\nand more lines")
        case "exit":
            os._exit(7)
        case "sys.exit":
            sys.exit("bye")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "text":
            return "1.0"
        case "nan":
            return float("nan")
        case "ungraded":
            return Score.ungraded("cannot say")
        case "huge":
            return Score(status=ScoreStatus.SCORED, value=1.0, detail="x" * 3_000_000)
        case "daemon":
            subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=sockets())
            os._exit(7)
        case ("sends", content):
            os.write(sockets()[0], content)
            return 1.0
        case "modules":
            return Score(status=ScoreStatus.SCORED, value=1.0, detail=",".join(sys.modules))
        case "pid":
            return os.getpid()
        case "gpus":
            return Score(
                status=ScoreStatus.SCORED, value=os.getpid(), detail=str(os.environ.get("CUDA_VISIBLE_DEVICES"))
            )
        case number:
            return number


def sockets() -> list[int]:
    """The descriptors that a child started without care would inherit."""
    return [int(name) for name in os.listdir("/proc/self/fd") if "socket" in os.path.realpath(f"/proc/self/fd/{name}")]


class Unbuildable:
    def __init__(self) -> None:
        raise OSError("the judge's key is missing")


class Dying:
    def __init__(self) -> None:
        os._exit(3)


class Scaled:
    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, prompt: Prompt, transcript: Transcript) -> float:
        return float(prompt.payload) * self.factor


def places(prompt: Prompt, transcripts: Any, scores: Any) -> Any:
    """Judges a group: its siblings' places by score. The payload may ask for something else."""
    match prompt.payload:
        case "few":
            return [1.0]
        case "half":
            return [1.0, *(Score.ungraded("cannot tell") for _ in scores[1:])]
        case "alone":
            raise LookupError("no others")
        case "hang":
            obey(Prompt(id="", task="", messages=(), payload="spin"), transcripts[0])
    values = sorted(score.value for score in scores)
    return [values.index(score.value) for score in scores]


def offset(prompt: Prompt, transcript: Transcript, *, by: float = 0.0) -> float:
    return float(prompt.payload) + by


class Slow:
    """Takes a moment, and says which process it is."""

    def __call__(self, prompt: Prompt, transcript: Transcript) -> float:
        time.sleep(0.05)
        return os.getpid()


class OnlyOne(Slow):
    """There can be only one at a time."""

    def __init__(self, path: str) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))

    def __call__(self, prompt: Prompt, transcript: Transcript) -> float:
        time.sleep(0.1)
        return 1.0


class Flaky:
    """Can be built once, and again only after so many failures."""

    def __init__(self, path: str, failures: int) -> None:
        with open(path, "a+") as file:
            file.write("x")
            file.seek(0)
            built = len(file.read())
        if 1 < built <= 1 + failures:
            raise OSError("not today")

    def __call__(self, prompt: Prompt, transcript: Transcript) -> float:
        return obey(prompt, transcript)


def writes_down(prompt: Prompt, transcript: Transcript, *, path: str) -> float:
    """A reward that writes down what it is asked, in order; "kill" ends its process, "slow" takes a while."""
    with open(path, "a") as file:
        file.write(f"{prompt.payload}\n")
    if prompt.payload == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if prompt.payload == "slow":
        time.sleep(0.8)
    return 1.0
