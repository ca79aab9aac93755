"""Tokens as engines report them: one delta for each request and step, or several joined."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from antiphon.core.errors import AntiphonError
from antiphon.core.types import MIXED_CACHE, FinishReason, FloatArray, IntArray, Streams

_NO_FLAGS = Streams({MIXED_CACHE: np.empty(0, np.bool_)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Tokens that were added to one request.

    The last delta of a request has a `finish`, or, if the engine refuses the request, an `error` that says why. `restarted`
    drops all tokens before it.
    """

    request: str
    tokens: IntArray  # [D]
    logprobs: FloatArray  # [D]
    versions: IntArray  # [D]
    streams: Streams = field(default_factory=Streams)  # [D]
    finish: FinishReason | None = None
    restarted: bool = False
    error: AntiphonError | None = None

    @property
    def is_last(self) -> bool:
        """True if the request ends with it."""
        return self.finish is not None or self.error is not None

    @staticmethod
    def empty(
        request: str,
        *,
        finish: FinishReason | None = None,
        restarted: bool = False,
        error: AntiphonError | None = None,
    ) -> "Delta":
        """Return a delta without tokens."""
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
        """Return one delta with the effect of several consecutive ones, at least one."""
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
            error=next((delta.error for delta in deltas if delta.error), None),
        )
