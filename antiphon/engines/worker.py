"""The side of an engine that runs in a worker process. `RemoteEngine` is the controller's side.

A message carries the deltas of several requests: those of finished requests at once, all others every `SEND_SECONDS`, because
a message for each token would cost more than the token of a small model.
"""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from antiphon.core.errors import REFUSALS, RequestError, UnsupportedError, UserCodeError, WeightsError, WorkerDiedError
from antiphon.core.torch_profile import ProfiledWorker
from antiphon.core.types import MIXED_CACHE, ROUTED_EXPERTS, GenerateRequest, OnUpdate, WeightsUpdate
from antiphon.engines.base import ENGINES, OpenEngine
from antiphon.engines.config import EngineKind
from antiphon.engines.deltas import Delta
from antiphon.weights.base import CHANNELS

SEND_SECONDS = 0.25


class WeightsLoaded(NamedTuple):
    """Event: the engine samples from new weights."""

    version: int
    loads: int  # calls of `load` that are done: the last of them, and those that it replaced


class EngineWorker(ProfiledWorker):
    """Runs an `EngineCore` in a worker process."""

    def __init__(self, kind: str, model: str, config: EngineKind, channel: str, key: str = "engine.kind") -> None:
        """Open the engine.

        Args:
            kind: Name of the factory (`base.OpenEngine`) in `ENGINES`, or its import path.
            model: Model directory.
            config: Options of the engine.
            channel: Name in `CHANNELS` of the way that weights come.
            key: Dotted key that the configuration has the factory's name under, for errors.
        """
        from antiphon.weights.reshard import receive_weights  # it imports torch, which the controller does without

        open_engine: OpenEngine = ENGINES.resolve(kind, key)
        self.core = open_engine(model, config, partial(receive_weights, CHANNELS.resolve(channel)))
        self._required = {MIXED_CACHE: key}  # stream that every token has -> key for the error if not
        if config.routed_experts:
            self._required[ROUTED_EXPERTS] = "engine.routed_experts"
        self._load_calls = 0
        self._core_loads = self.core.loads
        self._loaded = self._announced = WeightsLoaded(self.core.version, 0)
        self._paused = False
        self._unsent: dict[str, list[Delta]] = {}  # by request
        self._last_sent = time.monotonic()

    def limits(self) -> tuple[int, int, int]:
        """Return capacity, maximum length and vocabulary of the engine; answered once it is ready."""
        return self.core.capacity, self.core.max_length, self.core.vocabulary

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. If the core refuses it, emit one delta with the error; other requests go on."""
        try:
            self.core.add(request)
        except REFUSALS as error:
            self.emit([Delta.empty(request.id, error=error)])
        except Exception as error:  # noqa: BLE001 - named boundary: an invalid request must not end the engine
            traceback.print_exc()
            refusal = RequestError(f"request {request.id!r}: {type(error).__name__}: {error}")
            self.emit([Delta.empty(request.id, error=refusal)])

    def abort(self, request: str) -> None:
        """End a request early."""
        self.core.abort(request)

    def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load new weights; a `WeightsLoaded` event follows when they are in use."""
        self._load_calls += 1
        with self._name_setting_in_refusal(mode):
            self.core.load(update, mode)
        self._note_loads()

    @contextmanager
    def _name_setting_in_refusal(self, mode: OnUpdate) -> Iterator[None]:
        """Name the setting in an engine's refusal of a mode."""
        try:
            yield
        except UnsupportedError as error:
            if error.key:
                raise
            message = f"{type(self.core).__name__}: {error}"
            raise UnsupportedError(message, key="rollout.on_update", value=str(mode)) from error

    def sleep(self) -> None:
        """Leave the device."""
        self.core.sleep()

    def wake(self) -> None:
        """Take the device again."""
        self.core.wake()

    @override
    def start_profile(self, memory: bool) -> None:
        getattr(self.core, "start_profile", super().start_profile)(memory)

    @override
    def write_profile(self, folder: Path, name: str) -> None:
        getattr(self.core, "write_profile", super().write_profile)(folder, name)

    def pause(self) -> None:
        """Do no engine steps until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Do engine steps again."""
        self._paused = False

    def advance(self) -> bool:
        """Do one engine step; return True if there is more to do."""
        if self._paused:
            return False
        if self.core.busy:
            for delta in self._step():
                self._unsent.setdefault(delta.request, []).append(delta)
            self._send_deltas()
        self._note_loads()
        if self._loaded != self._announced:
            self._announced = self._loaded
            self.emit(self._announced)
        return self.core.busy

    def _step(self) -> list[Delta]:
        try:
            deltas = self.core.step()
        except WeightsError as error:  # of a load that waited for requests to end
            raise WorkerDiedError(f"an engine could not load weights: {error}") from error
        for delta in deltas:
            for spec, key in self._required.items() if len(delta.tokens) else ():
                if spec not in delta.streams:
                    name = f"{type(self.core).__module__}:{type(self.core).__qualname__}"
                    raise UserCodeError(f"{key}: {name} returns tokens without the stream {spec.name!r}", key=key)
        return deltas

    def _note_loads(self) -> None:
        """Note which loads are done. Versions do not tell: an engine may be given one that it has."""
        if self.core.loads != self._core_loads:
            self._core_loads = self.core.loads
            self._loaded = WeightsLoaded(self.core.version, self._load_calls)

    def _send_deltas(self) -> None:
        now = time.monotonic()
        due = now - self._last_sent >= SEND_SECONDS or not self.core.busy
        ready = [key for key, deltas in self._unsent.items() if due or deltas[-1].is_last]
        if ready:
            self.emit([Delta.join(self._unsent.pop(key)) for key in ready])
        if due:
            self._last_sent = now
