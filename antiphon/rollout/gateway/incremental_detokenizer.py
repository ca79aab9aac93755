"""Text as tokens come: only what will still stand when all have come."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from antiphon.core.types import IntArray
from antiphon.engines.deltas import Delta

UNKNOWN = "\ufffd"  # what the first bytes of a character are decoded to


class Decoder(Protocol):
    """The part of a tokenizer that is used here."""

    def decode(self, tokens: IntArray) -> str:
        """The text, without special tokens."""


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first stop string in it, and which that is."""
    found = [(at, -len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return text, None
    at, _, stop = min(found)
    return text[:at], stop


class IncrementalDetokenizer:
    """Tells the text of one reply piece by piece. Nothing is told of a stop string, nor of a character that is not whole."""

    def __init__(self, tokenizer: Decoder, stops: Sequence[str], on_text: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._tell = on_text
        self._tokens: list[IntArray] = []
        self._told = ""

    def __call__(self, delta: Delta) -> None:
        """More tokens."""
        if delta.restarted:
            self._tokens.clear()
        self._tokens.append(delta.tokens)
        text, _ = cut_at_stop(self._tokenizer.decode(np.concatenate(self._tokens)), self._stops)
        text = text.rstrip(UNKNOWN)
        text = text[: len(text) - max((_begun(text, stop) for stop in self._stops), default=0)]
        if len(text) > len(self._told) and text.startswith(self._told):
            self._tell(text[len(self._told) :])
            self._told = text


def _begun(text: str, stop: str) -> int:
    """Return the length of the longest prefix of a stop string that the text ends with."""
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)
