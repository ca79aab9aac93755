"""Engines that do nothing, and do that badly: one hangs as it starts, one refuses all requests, one cannot load weights."""

import threading
from pathlib import Path

import numpy as np

from antiphon.core.errors import RequestError, StateError, WeightsError, WorkerDiedError
from antiphon.core.types import MIXED_CACHE, OnUpdate, Streams
from antiphon.engines.deltas import Delta


class Idle:
    """What an `EngineCore` says of itself."""

    version = 0
    loads = 0
    capacity = 1
    max_length = 8
    vocabulary = 7
    busy = False

    def sleep(self):
        """Takes nothing."""

    def wake(self):
        """Takes nothing."""


def open_engine(model, config, receive):
    try:
        (Path(model) / "begun").mkdir()
    except FileExistsError:
        (Path(model) / "opened").touch()
        return Idle()
    return threading.Event().wait()


class Refusing(Idle):
    """Takes every request and refuses it in its next step."""

    def __init__(self):
        self.asked = []

    @property
    def busy(self):
        return bool(self.asked)

    def add(self, request):
        self.asked.append(request.id)

    def step(self):
        asked, self.asked = self.asked, []
        return [Delta.empty(name, error=RequestError(f"{name} cannot be run")) for name in asked]


class Unlucky(Idle):
    """Cannot load weights: what it needs for it has died, or the weights are not what was sent."""

    def load(self, update, mode):
        if mode is OnUpdate.KEEP:
            raise WorkerDiedError("a helper is gone")
        if mode is OnUpdate.RESTART:
            raise WeightsError("a wrong digest")
        self.busy = True  # what runs must end first

    def step(self):
        raise WeightsError("a wrong digest")


class Unready(Idle):
    """Refuses every request with an error that is not about the request."""

    def add(self, request):
        raise StateError("not ready")


class Expertless(Idle):
    """Samples one token, and does not say which experts computed it."""

    busy = True

    def step(self):
        self.busy = False
        arrays = {"tokens": np.zeros(1, np.int32), "logprobs": np.zeros(1), "versions": np.zeros(1, np.int32)}
        return [Delta(request="r", streams=Streams({MIXED_CACHE: np.zeros(1, np.bool_)}), **arrays)]


def open_expertless(model, config, receive):
    return Expertless()


def open_unready(model, config, receive):
    return Unready()


def open_refusing(model, config, receive):
    return Refusing()


def open_unlucky(model, config, receive):
    return Unlucky()
