"""One request in flight, as the controller sees it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from antiphon.core.types import Completion, FinishReason, GenerateRequest, Timing
from antiphon.engines.base import Delta


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
