"""The controller's side of an engine that runs in a worker process."""

import asyncio
import itertools
from contextlib import suppress

from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import AntiphonError, RequestError, WorkerDied
from antiphon.core.types import GenerateRequest, OnUpdate, WeightsUpdate
from antiphon.core.workers import WorkerHandle
from antiphon.engines.base import Delta
from antiphon.engines.generation import Generation
from antiphon.engines.worker import Loaded


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
