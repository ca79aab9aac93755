"""The controller's side of an engine that runs in a worker process."""

import asyncio
import itertools
from contextlib import suppress
from dataclasses import replace

from typing_extensions import override

from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import AntiphonError, RequestError, WorkerDiedError
from antiphon.core.types import GenerateRequest, OnUpdate, WeightsUpdate
from antiphon.core.workers import WorkerHandle
from antiphon.engines.base import InferenceEngine
from antiphon.engines.deltas import Delta
from antiphon.engines.generation import Generation
from antiphon.engines.worker import WeightsLoaded


class RemoteEngine(InferenceEngine):
    """An engine whose `EngineWorker` is reached by a `WorkerHandle`."""

    def __init__(self, handle: WorkerHandle, version: int = 0, *, colocated: bool = False, device: str = "") -> None:
        """Create the controller's side of a spawned worker.

        Args:
            handle: The worker.
            version: Version of the weights that it begins with.
            colocated: True if it shares a device with the learner.
            device: Class of its device.
        """
        self.handle = handle
        self.version = version
        self.colocated = colocated
        self.device = device
        self.dead = False
        self.capacity = 0
        self.max_length = 0
        self.vocabulary = 0
        self._requests: dict[str, Generation] = {}
        self._repeats = itertools.count()  # of ids
        self._load_calls = itertools.count(1)  # as the worker counts them
        self._loads: dict[int, asyncio.Future[None]] = {}
        handle.on_event(self._on_event)
        handle.on_death(self._on_death)

    async def ready(self) -> None:
        """Return once the engine has loaded its model."""
        self.capacity, self.max_length, self.vocabulary = await self.handle.call("limits")
        if self.colocated:  # find out before anything is trained that it can sleep
            await self.sleep()
            await self.wake()

    @override
    def start(self, request: GenerateRequest) -> Generation:
        request = self._make_unique(request)
        generation = Generation(self, request)
        if request.id in self._requests:
            generation.fail(RequestError(f"request {request.id!r} is already running"))
            return generation
        self._requests[request.id] = generation
        try:
            self.handle.send("add", request)
        except WorkerDiedError as error:
            generation.fail(error)
        return generation

    def _make_unique(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with another id if it has that of an aborted one, which the worker may not have ended yet."""
        earlier = self._requests.get(request.id)
        if earlier is None or not earlier.aborted:
            return request
        return replace(request, id=f"{request.id}#{next(self._repeats)}")

    @override
    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        call, loaded = next(self._load_calls), asyncio.get_running_loop().create_future()
        self._loads[call] = loaded
        await self.handle.call("load", update, mode)
        await loaded

    @override
    def pause(self) -> None:
        self._send("pause")

    @override
    def resume(self) -> None:
        self._send("resume")

    @override
    async def sleep(self) -> None:
        await self.handle.call("sleep")

    @override
    async def wake(self) -> None:
        await self.handle.call("wake")

    @override
    async def health(self) -> None:
        await self.handle.call("limits")

    @override
    def kill(self) -> None:
        self.dead = True  # from now on: the end of its process is noticed later, and its place may be wanted at once
        self.handle.kill()

    async def close(self) -> None:
        """End the worker without force."""
        await self.handle.close()

    def abort(self, request: str) -> None:
        """End a request early."""
        self._send("abort", request)

    def forget(self, request: str) -> None:
        """Note that a request has ended."""
        self._requests.pop(request, None)

    def _send(self, method: str, *args: str) -> None:
        with suppress(WorkerDiedError):  # requests and loads that wait for it fail in `_on_death`
            self.handle.send(method, *args)

    def _on_event(self, event: WeightsLoaded | list[Delta]) -> None:
        if isinstance(event, WeightsLoaded):
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
