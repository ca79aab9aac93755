"""One request in flight, as the controller sees it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Protocol

import numpy as np
from typing_extensions import override

from antiphon.core.types import Completion, FinishReason, GenerateRequest, Timing
from antiphon.engines.base import GenerationHandle
from antiphon.engines.deltas import Delta


class RequestOwner(Protocol):
    """The engine that runs a request, as its `Generation` sees it."""

    def abort(self, request: str) -> None:
        """End a request early."""

    def forget(self, request: str) -> None:
        """Note that a request has ended."""


class Generation(GenerationHandle):
    """Collects the deltas of a request, streams them to whoever iterates, and joins them in `result`."""

    def __init__(self, engine: RequestOwner, request: GenerateRequest) -> None:
        self.request = request
        self.aborted = False  # its last delta is under way
        self._engine = engine
        self._deltas: list[Delta] = []
        self._restarts = 0
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._queued = asyncio.get_running_loop().time()
        self._first = 0.0  # time of the first delta

    def receive(self, delta: Delta) -> None:
        """Add a delta."""
        if delta.error is not None:
            self._engine.forget(self.request.id)
            self.fail(delta.error)
            return
        if len(delta.logprobs) != len(delta.tokens):  # unknown which tokens the log-probs belong to: use none
            delta = replace(delta, logprobs=np.full(len(delta.tokens), np.nan, np.float32))
        self._first = self._first or asyncio.get_running_loop().time()
        if delta.restarted:
            self._deltas.clear()
            self._restarts += 1
        self._deltas.append(delta)
        if delta.finish is not None:
            self._engine.forget(self.request.id)
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """Fail the request: the engine died, or refuses it."""
        self._error = error
        self._changed.set()

    @override
    def abort(self) -> None:
        if self._error is None:
            self.aborted = True
            self._engine.abort(self.request.id)

    async def _wait_for_change(self) -> None:
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()

    @override
    async def __aiter__(self) -> AsyncIterator[Delta]:
        position = restarts = 0
        while True:
            if restarts != self._restarts:
                position, restarts = 0, self._restarts
            if position == len(self._deltas):
                await self._wait_for_change()
                continue
            delta = self._deltas[position]
            position += 1
            yield delta
            if delta.finish is not None:
                return

    @override
    async def result(self) -> Completion:
        while not self._deltas or self._deltas[-1].finish is None:
            await self._wait_for_change()
        return self.partial()

    @override
    def partial(self) -> Completion:
        whole = Delta.join([Delta.empty(self.request.id), *self._deltas])
        return Completion(
            tokens=whole.tokens,
            logprobs=whole.logprobs,
            versions=whole.versions,
            finish=whole.finish or FinishReason.ABORT,
            streams=whole.streams,
            timing=Timing(queued=self._queued, started=self._first, finished=asyncio.get_running_loop().time()),
        )
