"""An engine in a worker: `EngineWorker` there, `RemoteEngine` here.

Deltas travel in bundles: at once for requests that finished, and every `BUNDLE_SECONDS` for all others, because a
message a token would cost more than the token of a small model.
"""

import asyncio
import itertools
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import AntiphonError, RequestError, WorkerDied
from antiphon.core.registry import Registry
from antiphon.core.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    OnUpdate,
    Timing,
    WeightsUpdate,
)
from antiphon.core.workers import Worker, WorkerHandle
from antiphon.engines.base import Delta, EngineCore
from antiphon.engines.config import EngineConfig
from antiphon.weights.base import CHANNELS

ENGINES = Registry(
    "engine",
    {
        "native": "antiphon.engines.native.factory:open_engine",
        "vllm": "antiphon.engines.vllm:open_engine",
        "server": "antiphon.engines.server:ServerEngine",  # in the controller: it has no worker
    },
)

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


class RemoteEngine:
    """An `InferenceEngine` whose core runs behind a `WorkerHandle`."""

    def __init__(self, handle: WorkerHandle, version: int = 0, *, colocated: bool = False, device: str = "") -> None:
        self.handle = handle
        self.version = version
        self.colocated = colocated
        self.device = device
        self.dead = False
        self.capacity = 0
        self.max_length = 0
        self.vocabulary = 0
        self._requests: dict[str, Generation] = {}
        self._load_calls = itertools.count(1)  # as the worker counts them
        self._loads: dict[int, asyncio.Future[None]] = {}
        handle.on_event(self._on_event)
        handle.on_death(self._on_death)

    async def ready(self) -> None:
        """Return once the engine has loaded its model."""
        self.capacity, self.max_length, self.vocabulary = await self.handle.call("limits")
        if self.colocated:  # whether it can is known before anything is trained
            await self.sleep()
            await self.wake()

    def start(self, request: GenerateRequest) -> "Generation":
        """Send a request to the engine."""
        generation = Generation(self, request)
        if request.id in self._requests:
            generation.fail(RequestError(f"request {request.id!r} is already running"))
            return generation
        self._requests[request.id] = generation
        try:
            self.handle.send("add", request)
        except WorkerDied as error:
            generation.fail(error)
        return generation

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load published weights; returns when the engine samples from them."""
        call, loaded = next(self._load_calls), asyncio.get_running_loop().create_future()
        self._loads[call] = loaded
        await self.handle.call("load", update, mode)
        await loaded

    def pause(self) -> None:
        """See `InferenceEngine.pause`."""
        self._tell("pause")

    def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        self._tell("resume")

    def _tell(self, what: str, *args: str) -> None:
        with suppress(WorkerDied):  # whoever waits for it learns of that
            self.handle.send(what, *args)

    async def sleep(self) -> None:
        """See `InferenceEngine.sleep`."""
        await self.handle.call("sleep")

    async def wake(self) -> None:
        """See `InferenceEngine.wake`."""
        await self.handle.call("wake")

    async def health(self) -> None:
        """See `InferenceEngine.health`."""
        await self.handle.call("limits")

    def kill(self) -> None:
        """See `InferenceEngine.kill`."""
        self.handle.kill()

    async def close(self) -> None:
        """End it politely."""
        await self.handle.close()

    def abort(self, request: str) -> None:
        """End a request early."""
        self._tell("abort", request)

    def forget(self, request: str) -> None:
        """Listen no more to a request that ended."""
        self._requests.pop(request, None)

    def _on_event(self, event: Loaded | list[Delta]) -> None:
        if isinstance(event, Loaded):
            self.version = event.version
            for call in [call for call in self._loads if call <= event.loads]:
                succeed(self._loads.pop(call), None)
            return
        for delta in event:
            if (generation := self._requests.get(delta.request)) is not None:
                generation.receive(delta)

    def _on_death(self, error: AntiphonError) -> None:
        self.dead = True
        for generation in self._requests.values():
            generation.fail(error)
        for loaded in self._loads.values():
            fail(loaded, error)
        self._requests.clear()
        self._loads.clear()


class Runs(Protocol):
    """What runs a request, as its `Generation` sees it."""

    def abort(self, request: str) -> None:
        """End it early."""

    def forget(self, request: str) -> None:
        """It has ended."""


class Generation:
    """A `GenerationHandle`: collects deltas, streams them to whoever iterates, and joins them in `result`."""

    def __init__(self, engine: Runs, request: GenerateRequest) -> None:
        self.request = request
        self._engine = engine
        self._deltas: list[Delta] = []
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._queued = asyncio.get_running_loop().time()
        self._first = 0.0

    def receive(self, delta: Delta) -> None:
        """One more delta came."""
        if delta.error is not None:
            self._engine.forget(self.request.id)
            self.fail(delta.error)
            return
        if len(delta.logprobs) != len(delta.tokens):  # nobody knows which tokens lack theirs: none has any
            delta = replace(delta, logprobs=np.full(len(delta.tokens), np.nan, np.float32))
        self._first = self._first or asyncio.get_running_loop().time()
        if delta.restarted:
            self._deltas.clear()
        self._deltas.append(delta)
        if delta.finish is not None:
            self._engine.forget(self.request.id)
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """The engine died, or refuses the request."""
        self._error = error
        self._changed.set()

    def abort(self) -> None:
        """See `GenerationHandle.abort`."""
        if self._error is None:
            self._engine.abort(self.request.id)

    async def _change(self) -> None:
        """Wait for the next delta."""
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        position = 0
        while True:
            position = min(position, len(self._deltas))  # a restart begins anew
            for delta in self._deltas[position:]:
                position += 1
                yield delta
                if delta.finish is not None:
                    return
            await self._change()

    async def result(self) -> Completion:
        """See `GenerationHandle.result`."""
        while not self._deltas or self._deltas[-1].finish is None:
            await self._change()
        return self.partial()

    def partial(self) -> Completion:
        """See `GenerationHandle.partial`."""
        whole = Delta.join([Delta.empty(self.request.id), *self._deltas])
        return Completion(
            tokens=whole.tokens,
            logprobs=whole.logprobs,
            versions=whole.versions,
            finish=whole.finish or FinishReason.ABORT,
            streams=whole.streams,
            timing=Timing(queued=self._queued, started=self._first, finished=asyncio.get_running_loop().time()),
        )
