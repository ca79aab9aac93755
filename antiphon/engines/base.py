"""The seam between what schedules and what generates.

An engine lives where its device is. What the controller holds is an `InferenceEngine`: `RemoteEngine` is the one for
engines that run in a worker process of ours. The worker's side is an `EngineCore`.
"""

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from antiphon.core.errors import AntiphonError, RequestError, UnsupportedError
from antiphon.core.registry import Registry
from antiphon.core.types import (
    MIXED_CACHE,
    Completion,
    FinishReason,
    FloatArray,
    GenerateRequest,
    IntArray,
    OnUpdate,
    Sampling,
    Streams,
    WeightsUpdate,
)

__all__ = [
    "ENGINES",
    "Delta",
    "EngineCore",
    "GenerationHandle",
    "InferenceEngine",
    "WeightsUpdate",
    "check_sampling_supported",
    "validate_request",
]


ENGINES = Registry(
    "engine",
    {
        "native": "antiphon.engines.native.factory:open_engine",
        "vllm": "antiphon.engines.vllm:open_engine",
        "server": "antiphon.engines.server:ServerEngine",  # in the controller: it has no worker
    },
)

COOLEST = 0.01  # vLLM raises lower temperatures to this, and says so in its log only
COLDEST = 1e-20  # float32 logits that are divided by much less than this are infinite
FINISHED = {None: None, "stop": FinishReason.STOP, "length": FinishReason.LENGTH}  # as vLLM and OpenAI say it

_NO_FLAGS = Streams({MIXED_CACHE: np.empty(0, np.bool_)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Tokens that were added to one request; `finish` on the last. `restarted` drops what came before. A request that was
    refused has one delta, whose `error` says why."""

    request: str
    tokens: IntArray  # [D]
    logprobs: FloatArray  # [D]
    versions: IntArray  # [D]
    streams: Streams = field(default_factory=Streams)  # [D]
    finish: FinishReason | None = None
    restarted: bool = False
    error: AntiphonError | None = None

    @staticmethod
    def empty(
        request: str,
        *,
        finish: FinishReason | None = None,
        restarted: bool = False,
        error: AntiphonError | None = None,
    ) -> "Delta":
        """A delta without tokens."""
        return Delta(
            request=request,
            tokens=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            versions=np.empty(0, np.int32),
            streams=_NO_FLAGS,
            finish=finish,
            restarted=restarted,
            error=error,
        )

    @staticmethod
    def join(deltas: Sequence["Delta"]) -> "Delta":
        """One delta with the effect of several, at least one, in a row."""
        first = max((i for i, delta in enumerate(deltas) if delta.restarted), default=0)
        parts = deltas[first:]
        return Delta(
            request=parts[0].request,
            tokens=np.concatenate([delta.tokens for delta in parts]),
            logprobs=np.concatenate([delta.logprobs for delta in parts]),
            versions=np.concatenate([delta.versions for delta in parts]),
            streams=Streams.join([delta.streams for delta in parts]),
            finish=parts[-1].finish,
            restarted=parts[0].restarted,
        )


class EngineCore(Protocol):
    """An engine where it runs. `step` does one unit of work (a prefill chunk and a decode step) and returns what it made."""

    version: int
    loads: int  # updates that came into use so far, whatever their versions
    capacity: int  # requests decoded at once
    max_length: int  # most tokens of one, prompt included
    vocabulary: int  # tokens that its model knows

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raise `RequestError` for one that is invalid, or longer than the engine allows: whatever is raised
        here is the answer to this request, and no other is affected."""

    def abort(self, request: str) -> None:
        """End a request; its last delta has `FinishReason.ABORT`. Unknown ids are ignored."""

    def step(self) -> list[Delta]:
        """Advance all running requests by at most one token."""

    @property
    def busy(self) -> bool:
        """True while `step` has something to do."""

    def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Take new weights between two steps; with `DRAIN` they are taken once running requests have ended, unless another
        update comes before and replaces them."""

    def sleep(self) -> None:
        """Leave the device to others, and give back the KV cache; running requests must have ended. `load` works."""

    def wake(self) -> None:
        """Take the device again."""


def validate_request(request: GenerateRequest, max_length: int, vocabulary: int, *, decodes: bool) -> None:
    """Raise `RequestError` for a request that no engine of ours can run; `decodes` is true of an engine with a tokenizer."""
    tokens, sampling = request.tokens, request.sampling
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RequestError(f"request {request.id!r}: its tokens are no one-dimensional array of whole numbers")
    prompt = len(tokens)
    if prompt < 1 or not isinstance(sampling.max_tokens, int) or sampling.max_tokens < 1:
        raise RequestError(f"request {request.id!r} has {prompt} prompt tokens and asks for {sampling.max_tokens}")
    if prompt + sampling.max_tokens > max_length:
        raise RequestError(
            f"request {request.id!r} has {prompt} prompt tokens and asks for up to {sampling.max_tokens} more, "
            f"{prompt + sampling.max_tokens} in all; the engine holds {max_length} a sequence"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise RequestError(f"request {request.id!r} has tokens outside the vocabulary of {vocabulary}")
    if request.attachments:
        raise RequestError(f"request {request.id!r} has attachments; the engine reads text only")
    if sampling.stop and not decodes:
        raise RequestError(f"request {request.id!r} has stop strings, but the engine was given no tokenizer")
    for name in _invalid_settings(sampling):
        raise RequestError(f"request {request.id!r}: {name} {getattr(sampling, name)!r} is not possible")


def _invalid_settings(sampling: Sampling) -> list[str]:
    """Return the names of the settings that no token can be drawn with."""
    try:
        " ".join(sampling.stop).encode()
        text = True
    except (TypeError, UnicodeEncodeError):
        text = False
    valid = {
        "temperature": _is_number(sampling.temperature)
        and (sampling.temperature == 0 or COLDEST <= sampling.temperature < math.inf),
        "top_p": _is_number(sampling.top_p) and 0 < sampling.top_p <= 1,
        "top_k": isinstance(sampling.top_k, int) and 0 <= sampling.top_k < 1 << 63,
        "min_p": _is_number(sampling.min_p) and 0 <= sampling.min_p <= 1,
        "seed": isinstance(sampling.seed, int),
        "stop": text,
    }
    return [name for name, good in valid.items() if not good]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def check_sampling_supported(sampling: Sampling) -> None:
    """`UnsupportedError` for what vLLM, and servers like it, would do in another way than asked."""
    if sampling.truncated:
        raise UnsupportedError("vLLM samples from the whole vocabulary only here: no top_p, top_k or min_p")
    if 0 < sampling.temperature < COOLEST:
        raise UnsupportedError(
            f"vLLM knows no temperature between 0 and {COOLEST:g}; asked for {sampling.temperature:g}"
        )


class GenerationHandle(Protocol):
    """One request in flight."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """The deltas as they come."""

    async def result(self) -> Completion:
        """The whole completion; after `abort`, what there was."""

    def partial(self) -> Completion:
        """What is known of the completion now, as if it were aborted here; of a dead engine, what it had told."""

    def abort(self) -> None:
        """End the request; `result` then returns the partial completion."""


class InferenceEngine(Protocol):
    """An engine as the pool sees it. Once it has died, `load` and the results of all requests raise `WorkerDied`."""

    version: int
    capacity: int
    colocated: bool  # shares a device with what trains, and sleeps meanwhile
    device: str  # its class, such as h800; empty if nobody said

    def start(self, request: GenerateRequest) -> GenerationHandle:
        """Send a request."""

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load published weights; returns when every later token comes from them."""

    def pause(self) -> None:
        """Take requests, and do nothing else until `resume`."""

    def resume(self) -> None:
        """Go on."""

    async def sleep(self) -> None:
        """Leave the device to others; nothing runs any more."""

    async def wake(self) -> None:
        """Take the device again."""

    async def health(self) -> None:
        """Return once the engine has answered: at the latest after the step it is at."""

    def kill(self) -> None:
        """End the engine by force: it is dead when this returns, or soon after."""
