"""The interface between what schedules and what generates.

An engine lives where its device is. The controller holds an `InferenceEngine`: a `RemoteEngine` for an engine in a worker
process, whose side there is an `EngineCore`.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from antiphon.core.registry import Registry
from antiphon.core.types import Completion, GenerateRequest, OnUpdate, WeightsUpdate
from antiphon.engines.deltas import Delta

ENGINES = Registry(
    "engine",
    {
        "native": "antiphon.engines.native.factory:open_engine",
        "vllm": "antiphon.engines.vllm:open_engine",
        "server": "antiphon.engines.server:ServerEngine",  # in the controller: it has no worker
    },
)


class EngineCore(Protocol):
    """An engine where it runs. `step` does one unit of work (a prefill chunk and a decode step) and returns its tokens."""

    version: int
    loads: int  # updates that came into use so far, whatever their versions
    capacity: int  # requests decoded at once
    max_length: int  # most tokens of a request, prompt included
    vocabulary: int  # tokens that its model knows

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. An exception refuses this request alone.

        Raises:
            RequestError: If the request is invalid, or longer than the engine allows.
        """

    def abort(self, request: str) -> None:
        """End a request; its last delta has `FinishReason.ABORT`. Unknown ids are ignored."""

    def step(self) -> list[Delta]:
        """Advance all running requests by at most one token."""

    @property
    def busy(self) -> bool:
        """True while `step` has something to do."""

    def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load new weights between two steps.

        With `DRAIN` they are loaded once running requests have ended, unless another update replaces them before.
        """

    def sleep(self) -> None:
        """Leave the device and free the KV cache; no request may be running. `load` works meanwhile."""

    def wake(self) -> None:
        """Take the device again."""


class GenerationHandle(Protocol):
    """One request in flight."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield deltas as they come."""

    async def result(self) -> Completion:
        """Return the whole completion; after `abort`, the partial one."""

    def partial(self) -> Completion:
        """Return the tokens received so far, as if the request were aborted now; also of a dead engine."""

    def abort(self) -> None:
        """End the request; `result` then returns the partial completion."""


class InferenceEngine(Protocol):
    """An engine as the pool sees it. Once it has died, `load` and the results of all requests raise `WorkerDiedError`."""

    version: int
    capacity: int
    colocated: bool  # shares a device with the learner, and sleeps while that trains
    device: str  # its class, such as h800; empty if unknown

    def start(self, request: GenerateRequest) -> GenerationHandle:
        """Send a request."""

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load published weights; return when every later token comes from them."""

    def pause(self) -> None:
        """Queue requests, and do nothing else until `resume`."""

    def resume(self) -> None:
        """Continue after `pause`."""

    async def sleep(self) -> None:
        """Leave the device; no request may be running."""

    async def wake(self) -> None:
        """Take the device again."""

    async def health(self) -> None:
        """Return once the engine has answered, at the latest after its present step."""

    def kill(self) -> None:
        """End the engine by force; it is dead when this returns, or soon after."""
