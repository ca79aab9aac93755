"""The side of an engine that runs in a worker process. `RemoteEngine` is the controller's side.

Deltas travel in bundles: those of finished requests at once, all others every `BUNDLE_SECONDS`, because a message for
each token would cost more than the token of a small model.
"""

import time
import traceback
from typing import NamedTuple

from antiphon.core.errors import AntiphonError, RequestError
from antiphon.core.types import GenerateRequest, OnUpdate, WeightsUpdate
from antiphon.core.workers import Worker
from antiphon.engines.base import ENGINES, Delta, EngineCore
from antiphon.engines.config import EngineConfig
from antiphon.weights.base import CHANNELS

BUNDLE_SECONDS = 0.25


class Loaded(NamedTuple):
    """What an engine tells when it samples from new weights."""

    version: int
    loads: int  # calls of `load` that are done: the last of them, and those that it replaced


class EngineWorker(Worker):
    """Runs an `EngineCore` in a worker process.

    `kind` names what opens it, called with (model directory, config, receive); `channel` the way that weights come.
    """

    def __init__(self, kind: str, model: str, config: EngineConfig, channel: str) -> None:
        self.core: EngineCore = ENGINES.resolve(kind)(model, config, CHANNELS.resolve(channel).receive)
        self._load_calls = 0
        self._core_loads = self.core.loads
        self._loaded = self._announced = Loaded(self.core.version, 0)
        self._paused = False
        self._waiting: dict[str, list[Delta]] = {}
        self._sent = time.monotonic()

    def limits(self) -> tuple[int, int, int]:
        """Requests the engine decodes at once, the most tokens of one, and the tokens there are; answered once the engine is
        ready."""
        return self.core.capacity, self.core.max_length, self.core.vocabulary

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. One that the core refuses fails alone: its only delta says why."""
        try:
            self.core.add(request)
        except AntiphonError as error:
            self.emit([Delta.empty(request.id, error=error)])
        except Exception as error:  # noqa: BLE001 - named boundary: an invalid request is no end of the engine
            traceback.print_exc()
            refusal = RequestError(f"request {request.id!r}: {type(error).__name__}: {error}")
            self.emit([Delta.empty(request.id, error=refusal)])

    def abort(self, request: str) -> None:
        """End a request early."""
        self.core.abort(request)

    def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Take new weights; an event tells when they are in use."""
        self._load_calls += 1
        self.core.load(update, mode)
        self._note_loads()

    def sleep(self) -> None:
        """Leave the device to others."""
        self.core.sleep()

    def wake(self) -> None:
        """Take the device again."""
        self.core.wake()

    def pause(self) -> None:
        """Do no engine steps until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Go on."""
        self._paused = False

    def advance(self) -> bool:
        """One engine step."""
        if self._paused:
            return False
        if self.core.busy:
            for delta in self.core.step():
                self._waiting.setdefault(delta.request, []).append(delta)
            self._send_deltas()
        self._note_loads()
        if self._loaded != self._announced:
            self._announced = self._loaded
            self.emit(self._announced)
        return self.core.busy

    def _note_loads(self) -> None:
        """Find out which loads are done. Versions do not tell: an engine may be given one that it has."""
        if self.core.loads != self._core_loads:
            self._core_loads = self.core.loads
            self._loaded = Loaded(self.core.version, self._load_calls)

    def _send_deltas(self) -> None:
        now = time.monotonic()
        due = now - self._sent >= BUNDLE_SECONDS or not self.core.busy
        ready = [key for key, deltas in self._waiting.items() if due or deltas[-1].finish]
        if ready:
            self.emit([Delta.join(self._waiting.pop(key)) for key in ready])
        if due:
            self._sent = now
