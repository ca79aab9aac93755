"""Why and when a sequence ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from antiphon.core.types import FinishReason, GenerateRequest


class Decoder(Protocol):
    """What of a tokenizer the engine needs, for stop strings only."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """The text of the tokens."""


def read_decoder(model: str) -> Decoder | None:
    """The tokenizer in a model's directory; None if there is none, as for models that only tests have."""
    found: Any = PreTrainedTokenizerFast.from_pretrained(model) if (Path(model) / "tokenizer.json").is_file() else None
    return found


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends one request besides the model's own end tokens and the limit."""

    tokens: frozenset[int]
    strings: tuple[str, ...]
    window: int  # tokens at the end within which a stop string that was completed just now must lie

    @staticmethod
    def of(request: GenerateRequest) -> "StopRule | None":
        """The rule of a request; None if it names no stops."""
        sampling = request.sampling
        if not sampling.stop and not sampling.stop_tokens:
            return None
        # A token is at least one byte of text; one more, so that a character cut at the window's start does no harm.
        window = max((len(text.encode()) for text in sampling.stop), default=0) + 1
        return StopRule(frozenset(sampling.stop_tokens), sampling.stop, window)

    def ends(self, completion: NDArray[np.int32], decoder: Decoder | None) -> bool:
        """True if the last of the tokens sampled so far [C] completes a stop."""
        if int(completion[-1]) in self.tokens:
            return True
        if not self.strings or decoder is None:
            return False
        text = decoder.decode(completion[-self.window :].tolist())
        return any(stop in text for stop in self.strings)


def finish_reasons(
    ended: NDArray[np.bool_], length: NDArray[np.int64], limit: NDArray[np.int64]
) -> list[FinishReason | None]:
    """The reason of each row [R]: a stop goes before the limit."""
    reasons: list[FinishReason | None] = [None] * len(ended)
    for row in np.flatnonzero(ended | (length >= limit)).tolist():
        reasons[row] = FinishReason.STOP if ended[row] else FinishReason.LENGTH
    return reasons
