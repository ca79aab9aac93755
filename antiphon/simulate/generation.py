"""Requests of a simulated engine: the handle that the caller has, and the sequence that the engine decodes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np

from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import AntiphonError
from antiphon.core.types import MIXED_CACHE, Completion, FinishReason, GenerateRequest, Streams, Timing
from antiphon.engines.deltas import Delta

SAMPLED = 1  # the token that all completions consist of


class SimulatedGeneration:
    """A `GenerationHandle` whose tokens all come at its end."""

    def __init__(
        self,
        request: GenerateRequest,
        partial: Callable[["SimulatedGeneration"], Completion],
        abort: Callable[[str], None],
    ) -> None:
        """Make a handle.

        Args:
            request: The request.
            partial: Returns the tokens that the engine has for a handle.
            abort: Ends the request with an id.
        """
        loop = asyncio.get_running_loop()
        self.request = request
        self.queued = loop.time()
        self.began = 0.0
        self.sequence: Sequence  # set by the engine, until the request has its completion
        self._partial = partial
        self._abort = abort
        self._completion: asyncio.Future[Completion] = loop.create_future()

    async def result(self) -> Completion:
        """Wait for the completion."""
        return await self._completion

    async def __aiter__(self) -> AsyncIterator[Delta]:
        whole = await self.result()
        yield Delta(
            request=self.request.id,
            tokens=whole.tokens,
            logprobs=whole.logprobs,
            versions=whole.versions,
            streams=whole.streams,
            finish=whole.finish,
        )

    def partial(self) -> Completion:
        """Return the tokens so far."""
        return self._partial(self) if hasattr(self, "sequence") else self._completion.result()

    def abort(self) -> None:
        """End the request with the tokens so far."""
        if not self._completion.done() or self._completion.cancelled():  # else another request may have its id
            self._abort(self.request.id)

    def finish(self, completion: Completion) -> None:
        """Set the completion, and forget the sequence, so that both are freed without a search for cycles."""
        succeed(self._completion, completion)
        if not self._completion.cancelled():
            del self.sequence

    def fail(self, error: AntiphonError) -> None:
        """Set the error that ended the request."""
        fail(self._completion, error)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine. `done` and `born` count tokens and iterations of the engine."""

    request: GenerateRequest
    order: int
    generation: SimulatedGeneration
    target: int = 0  # tokens it will have
    done: int = 0  # tokens it has, while it does not run
    born: int = 0  # while it runs: the engine's iteration before its first token
    ends: int = -1  # while it runs: the iteration of its last token
    spans: list[tuple[int, int]] = field(default_factory=list)  # (first token, version that sampled from there on)
    mixed_from: int | None = None  # first token that was sampled over a cache of more than one version
    prefix: tuple[str, int] = field(
        init=False
    )  # equal for siblings in their first turn, which share the prompt's cache

    def __post_init__(self) -> None:
        self.prefix = (self.request.affinity or (self.request.id,))[-1], len(self.request.tokens)

    @property
    def place(self) -> tuple[int, int]:
        """The sort key of the queue."""
        return self.request.priority, self.order

    @property
    def size(self) -> int:
        """Tokens to prefill before it can run."""
        return len(self.request.tokens) + self.done

    def make_completion(self, count: int, finish: FinishReason) -> Completion:
        """Return a completion of its first `count` tokens."""
        versions = np.zeros(count, np.int32)
        for first, version in self.spans:
            versions[first:] = version
        mixed = np.zeros(count, np.bool_)
        if self.mixed_from is not None:
            mixed[self.mixed_from :] = True
        finished = asyncio.get_running_loop().time()
        return Completion(
            tokens=np.full(count, SAMPLED, np.int32),
            logprobs=np.zeros(count, np.float32),
            versions=versions,
            finish=finish,
            streams=Streams({MIXED_CACHE: mixed}),
            timing=Timing(queued=self.generation.queued, started=self.generation.began, finished=finished),
        )


def count_resumed(request: GenerateRequest) -> int:
    """Return how many tokens at the request's end an earlier engine sampled: they are ones, all others are zeros."""
    if request.tokens[-1] != SAMPLED:
        return 0
    others = np.flatnonzero(request.tokens != SAMPLED)
    return len(request.tokens) - int(others[-1]) - 1 if len(others) else len(request.tokens)
