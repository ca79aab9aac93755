"""The interface between what schedules and what generates.

To write an engine of your own, write an `EngineCore` and its factory, an `OpenEngine`, and name the factory in `engine.kind` as
`package.module:attribute` (`docs/engines.md`, "An engine of your own"; `tests/example_engine.py` is one).

An engine lives where its device is: an `EngineCore` in a process of its own, which `engines.worker.EngineWorker` drives. The
controller holds an `InferenceEngine`: a `RemoteEngine` that talks to that process, or a `ServerEngine` that talks to a server.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from antiphon.core.registry import Registry
from antiphon.core.types import Completion, GenerateRequest, OnUpdate, WeightsUpdate
from antiphon.engines.config import EngineKind
from antiphon.engines.deltas import Delta

if TYPE_CHECKING:  # the controller imports no torch
    import torch

Receive: TypeAlias = "Callable[[WeightsUpdate], Iterable[tuple[str, torch.Tensor]]]"
"""Yields the tensors of an update by name, as `WeightChannel.receive` describes."""

ENGINES = Registry(
    "engine",
    {
        "native": "antiphon.engines.native.factory:open_engine",
        "vllm": "antiphon.engines.vllm:open_engine",
    },
    group="antiphon.engines",
)
"""Factories (`OpenEngine`) of the engines that run in a process of their own: the built-in ones, and those that installed
packages register as entry points `antiphon.engines`. The kind `server` has none: `engines.server` connects to processes that
others started."""


class EngineCore(Protocol):
    """An engine where it runs. All calls come from one thread, one at a time.

    One that computes in other processes may have the methods of `core.torch_profile.ProfiledWorker`, to profile these.

    An error that is no `AntiphonError` ends the engine's process: the pool replaces the engine, and its requests continue on
    others from the tokens they have. An `AntiphonError` that a method does not declare ends the run with its message.
    """

    version: int  # of the weights in use
    loads: int  # rises whenever an update has come into use, whatever its version
    capacity: int  # requests decoded at once
    max_length: int  # most tokens of a request, prompt included
    vocabulary: int  # tokens that its model knows

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Any exception refuses this request alone: its attempt has failed, and the engine goes on.

        `docs/engines.md` lists the fields of a request that an engine obeys.

        Raises:
            RequestError: The request is invalid or longer than the engine allows, or its id is in use.
            UnsupportedError: The engine cannot sample as the request asks.
        """

    def abort(self, request: str) -> None:
        """End a request; its last delta has `FinishReason.ABORT`. Unknown ids are ignored."""

    def step(self) -> list[Delta]:
        """Do one unit of work (a prefill chunk, a decode step) and return what is new of each request.

        A delta may have any number of tokens. Aborts, loads and health checks wait for the step to end, so keep it short.
        The last delta of a request has a `finish`, or an `error` that refuses the request as `add` may. Each token comes with
        its log-prob, that of `Completion`; the version of the weights that sampled it; and the stream `MIXED_CACHE`.
        """

    @property
    def busy(self) -> bool:
        """True while `step` has something to do."""

    def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load new weights between two steps; count them in `loads` once they are in use.

        With `DRAIN` they are loaded in the step in which the last running request ends, and no other is started meanwhile. If
        another update arrives before that, only the newest is loaded.

        Raises:
            WeightsError: They are not weights of this model. The pool kills the engine and replaces it, so that it does not
                matter which weights it has. Also from `step`, where that loads.
            WorkerDiedError: A part of the engine is gone; the same happens.
            UnsupportedError: The engine does not know the mode; the run ends.
        """

    def sleep(self) -> None:
        """Leave the device and free the KV cache. `add` and `load` work meanwhile; requests start after `wake`.

        Raises:
            StateError: Requests are running.
            UnsupportedError: The engine keeps its device and goes on; it cannot share one with the learner.
        """

    def wake(self) -> None:
        """Take the device again. Does nothing if the engine is awake."""


class OpenEngine(Protocol):
    """The factory of an engine, called in the engine's process: a function, or a class with these parameters."""

    def __call__(self, model: str, config: EngineKind, receive: Receive, /) -> EngineCore:
        """Return the engine, ready to run.

        Args:
            model: Directory of the model.
            config: The engine's part of `engine`; `config.options` are the engine's own, except those that say on how many
                devices it runs (`PARALLEL_SIZES`).
            receive: Yields the tensors of an update.
        """


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
