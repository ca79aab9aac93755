"""Workers that do what tests need done in a process of its own."""

import os
import signal
import sys
from pathlib import Path

from antiphon.core.errors import DataError
from antiphon.core.workers import Worker


class Counter(Worker):
    """Counts down in the background, and answers."""

    def __init__(self, start: int = 0) -> None:
        self.left = start
        self.notes: list[int] = []

    def advance(self) -> bool:
        if self.left:
            self.left -= 1
            self.emit(self.left)
        return self.left > 0

    def begin(self, start: int) -> None:
        self.left = start

    def echo(self, value):
        return value

    def note(self, number: int, _: bytes) -> None:
        self.notes.append(number)

    def noted(self) -> list[int]:
        return self.notes

    def say(self, text: str) -> None:
        print(text, flush=True)

    def gpus(self) -> list[str]:
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")

    def environment(self, name: str) -> str:
        return os.environ.get(name, "")

    def pid(self) -> int:
        return os.getpid()

    def parent(self) -> int:
        return os.getppid()

    def imported(self, module: str) -> bool:
        return module in sys.modules

    def interpreter(self) -> tuple[str, list[str]]:
        return sys.prefix, sys.path

    def send_raw(self, message: bytes) -> None:
        """Send bytes in place of a message."""
        self.emit.__closure__[0].cell_contents.__closure__[0].cell_contents(message)

    def send_a_call(self, path: str):
        return CallsTouch(path)

    def refuse(self) -> None:
        raise DataError("there is no such thing", path="thing.json")

    def fail(self) -> None:
        raise ZeroDivisionError("a bug")

    def kill_itself(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class CallsTouch:
    """Its pickle touches a file where it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.open, (self.path, os.O_CREAT)


class Unbuildable(Worker):
    """Cannot be made."""

    def __init__(self) -> None:
        raise DataError("model 'x' is missing", path="x")


class Weights(Worker):
    """An end of Ray's way of weights. What it needs is imported here, where another interpreter does not come."""

    def __init__(self, encoding: str = "whole") -> None:
        from antiphon.weights.base import TransferContext, open_channel

        self.channel = open_channel(TransferContext(Path(), "object_store", encoding=encoding))

    def send(self, version: int, length: int):
        import torch

        return self.channel.send([("a", torch.full((length,), float(version)))], version)

    def spoil(self) -> None:
        """Put something else in the place of the whole version."""
        import numpy as np

        from antiphon.cluster.ray import put_object

        put_object("weights", np.zeros(4096, np.uint8))

    def load(self, update) -> list[float]:
        ((_, tensor),) = self.channel.receive(update)
        return tensor.tolist()


class Setter(Worker):
    """Sets something of the whole process while it is built, for some turns of the interpreter, as the load of a model does."""

    default = ""

    def __init__(self, own: str) -> None:
        before, Setter.default = Setter.default, own
        self.kept = not before and all(Setter.default == own for _ in range(300_000))
        Setter.default = before

    def undisturbed(self) -> bool:
        return self.kept
