"""Rules that end a sequence: stop tokens, stop strings and the limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from antiphon.core.types import FinishReason, GenerateRequest

FINISH_REASONS = {
    None: None,
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}  # by the names of vLLM and OpenAI


class Decoder(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Return the text of tokens."""


def read_decoder(model: str) -> Decoder | None:
    """Return the tokenizer of a model directory; None if it has none, as some models of tests."""
    found: Any = PreTrainedTokenizerFast.from_pretrained(model) if (Path(model) / "tokenizer.json").is_file() else None
    return found


@dataclass(frozen=True, slots=True)
class StopRule:
    """Stops of one request, besides the model's own end tokens and the limit."""

    tokens: frozenset[int]
    strings: tuple[str, ...]
    window: int  # tokens at the end within which a stop string that was just completed must lie
    before: tuple[int, ...] = ()  # the last tokens that another engine has sampled, fewer than the window

    @staticmethod
    def of(request: GenerateRequest) -> "StopRule | None":
        """Return the rule of a request; None if it names no stops."""
        sampling = request.sampling
        if not sampling.stop and not sampling.stop_tokens:
            return None
        # A token is at least one byte of text. One more token, so that a character cut at the window's start does no harm.
        window = max((len(text.encode()) for text in sampling.stop), default=0) + 1
        before = request.tokens[len(request.tokens) - min(request.sampled, window - 1) :]
        return StopRule(frozenset(sampling.stop_tokens), sampling.stop, window, tuple(before.tolist()))

    def matches(self, completion: NDArray[np.int32], decoder: Decoder | None) -> bool:
        """Return True if the last of the sampled tokens [C] completes a stop."""
        if int(completion[-1]) in self.tokens:
            return True
        if not self.strings or decoder is None:
            return False
        text = decoder.decode([*self.before, *completion[-self.window :].tolist()][-self.window :])
        return any(stop in text for stop in self.strings)


def append_to_stop(
    sampled: list[int], tokens: Sequence[int], rule: StopRule | None, decoder: Decoder | None
) -> tuple[int, bool]:
    """Append new tokens of a sequence to those that were sampled before, up to the first that completes a stop.

    Returns:
        How many were appended, and whether the last of them completes a stop.
    """
    for count, token in enumerate(tokens, 1):
        sampled.append(token)
        if rule is not None and rule.matches(np.array(sampled[-rule.window :], np.int32), decoder):
            return count, True
    return len(tokens), False


def finish_reasons(
    ended: NDArray[np.bool_], length: NDArray[np.int64], limit: NDArray[np.int64]
) -> list[FinishReason | None]:
    """Return the reason why each row [R] ends, or None. A stop takes precedence over the limit."""
    reasons: list[FinishReason | None] = [None] * len(ended)
    for row in np.flatnonzero(ended | (length >= limit)).tolist():
        reasons[row] = FinishReason.STOP if ended[row] else FinishReason.LENGTH
    return reasons
