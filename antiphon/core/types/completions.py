"""Prompts, requests to engines, and the completions that engines sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from antiphon.core.types.arrays import FloatArray, IntArray, require_length
from antiphon.core.types.pickling import quick_to_pickle
from antiphon.core.types.streams import Streams
from antiphon.core.types.versions import Sampling


@quick_to_pickle
@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the policy; the tool's answer refers to it by `id`."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@quick_to_pickle
@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. An assistant may call tools; a tool answers the call `tool_call_id`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@quick_to_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A task instance. `id` is stable across resumes; `payload` is opaque to all but its task."""

    id: str
    task: str
    messages: tuple[Message, ...]
    payload: Any = None
    attachments: tuple[Any, ...] = ()
    seed: int = 0
    epoch: int = 0


@quick_to_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request for one completion.

    Lower `priority` goes first. By the other fields the pool chooses an engine, which need not look at them: `affinity` names
    what shares a prefix with the request, the longest prefix first (its conversation, its group); the engine holds at least
    `min_version`; `task` may prefer some engines.
    """

    id: str
    tokens: IntArray  # [P]
    sampling: Sampling
    affinity: tuple[str, ...] = ()
    priority: int = 0
    min_version: int = 0
    task: str = ""
    attachments: tuple[Any, ...] = ()
    sampled: int = 0  # of `tokens`, at their end, that another engine has sampled: a stop string may begin in them


class FinishReason(StrEnum):
    """Reason for the end of a completion."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@quick_to_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times at which a piece of work was requested, began and ended, in seconds."""

    queued: float = 0.0
    started: float = 0.0
    finished: float = 0.0


@quick_to_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled tokens, with log-probs under log-softmax(logits / temperature), or of the logits at temperature 0.

    Where the stream `SAMPLING_SUPPORT` is there, log-probs are those of the truncated distribution.
    """

    tokens: IntArray  # [C]
    logprobs: FloatArray  # [C]
    versions: IntArray  # [C] number of the version that sampled each token
    finish: FinishReason
    streams: Streams = field(default_factory=Streams)  # [C]
    timing: Timing = Timing()
    engines: tuple[int, ...] = ()  # numbers in the pool: more than one if an engine died and another continued

    def __post_init__(self) -> None:
        require_length("Completion", len(self.tokens), logprobs=self.logprobs, versions=self.versions)
        self.streams.check_length("Completion", len(self.tokens))

    @staticmethod
    def join(pieces: Sequence["Completion"]) -> "Completion":
        """Concatenate the pieces of one completion, each of which continues the one before."""
        first, last = pieces[0], pieces[-1]
        return Completion(
            tokens=np.concatenate([piece.tokens for piece in pieces]),
            logprobs=np.concatenate([piece.logprobs for piece in pieces]),
            versions=np.concatenate([piece.versions for piece in pieces]),
            finish=last.finish,
            streams=Streams.join([piece.streams for piece in pieces]),
            timing=Timing(queued=first.timing.queued, started=first.timing.started, finished=last.timing.finished),
            engines=tuple(number for piece in pieces for number in piece.engines),
        )
