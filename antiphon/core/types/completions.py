"""Prompts, requests to engines, and the completions that engines sample."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
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
    """One chat message. An assistant may call tools; a tool answers the call `tool_call_id`.

    `images` are files in memory, such as PNG or JPEG; each stands where `content` has one more `IMAGE_MARKER`.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    images: tuple[bytes, ...] = ()

    def to_openai(self) -> dict[str, Any]:
        """Return role and content as in OpenAI's API: a text, or with images a list of texts and data URLs."""
        if not self.images:
            return {"role": self.role, "content": self.content}
        parts: list[dict[str, Any]] = []
        for number, text in enumerate(self.content.split(IMAGE_MARKER)):
            if 0 < number <= len(self.images):
                parts.append({"type": "image_url", "image_url": {"url": data_url(self.images[number - 1])}})
            parts += [{"type": "text", "text": text}] if text else []
        return {"role": self.role, "content": parts}


IMAGE_MARKER = "<image>"
"""Stands for an image in the content of a message that has images."""

_BEGINNINGS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp"}


def data_url(image: bytes) -> str:
    """Return an image file as a data URL in base64."""
    kind = next((name for beginning, name in _BEGINNINGS.items() if image.startswith(beginning)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


@lru_cache(maxsize=256)
def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@quick_to_pickle
@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image, and the tokens that stand for it in a sequence.

    Attributes:
        data: The image's file, such as PNG or JPEG.
        start: Place of the first token that is computed from the image.
        stop: One past the last; tokens in between that are none of the model's image tokens are text, such as ends of rows.
    """

    data: bytes
    start: int
    stop: int

    @property
    def digest(self) -> str:
        """Hexadecimal digest of the file."""
        return _digest(self.data)

    def shifted(self, tokens: int) -> "PlacedImage":
        """Return the image with its place moved by so many tokens."""
        return PlacedImage(self.data, self.start + tokens, self.stop + tokens)


def require_places(owner: str, length: int, images: Sequence[PlacedImage]) -> None:
    """Raise `ValueError` unless images lie one after another within `length` tokens."""
    places = [place for image in images for place in (image.start, image.stop - 1)]
    if places != sorted(places) or any(not 0 <= place < length for place in places):
        raise ValueError(f"{owner}: its images lie at {places}, not one after another in {length} tokens")


@quick_to_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A task instance. `id` is stable across resumes; `payload` is opaque to all but its task."""

    id: str
    task: str
    messages: tuple[Message, ...]
    payload: Any = None
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
    attachments: tuple[PlacedImage, ...] = ()
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

    Where the stream `SAMPLING_SUPPORT` is there, log-probs are those of the truncated distribution. Penalties come before the
    temperature.
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
