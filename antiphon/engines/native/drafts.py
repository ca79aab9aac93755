"""Guesses of the next tokens of a sequence, from what it and others have said after the same words.

A guess costs no model: it is what followed when the last tokens of a sequence occurred before, in the sequence itself or in
another completion of the same prompt, of a sibling or of an earlier epoch. The engine computes all guessed tokens of a
sequence in one step, draws a token at each position as it always does, and keeps the guessed ones for as long as the draws
agree with them. So guesses change how many tokens a step yields, and nothing about which.

Source: Saxena 2023, "Prompt lookup decoding", for guesses by n-grams; Leviathan et al. 2023, "Fast inference from transformers
via speculative decoding", for their verification in one step.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from antiphon.engines.native.slots import Indices, SlotTable

NGRAM = 3  # tokens that must have occurred before
MOST_PROMPTS = 512  # whose completions are remembered
MOST_TOKENS = 16_384  # remembered of one prompt and its completions
MOST_TOKENS_OF_ALL = 1 << 20  # remembered of all prompts, when a new one comes
RETRY = 8  # tokens after which a sequence is guessed again whose guesses were wrong
HOPELESS = 0.2  # share of right guesses below which a sequence is guessed rarely

Gram = tuple[int, ...]


@dataclass(slots=True)
class _History:
    """Continuations of each n-gram in the completions of one prompt."""

    following: dict[Gram, tuple[list[int], int]] = field(default_factory=dict)  # n-gram -> a sequence and a place in it
    tokens: int = 0


@dataclass(slots=True)
class _Sequence:
    """A running request as far as it has been read."""

    request: str
    history: _History
    tokens: list[int] = field(default_factory=list)
    share: float = 0.6  # of guessed tokens that were right, a moving average
    wait: int = 0  # tokens before the next guess


class Drafter:
    """Guesses tokens for the sequences of a slot table."""

    def __init__(self, most: int, rows: int) -> None:
        """Guess at most `most` tokens for a sequence, and compute at most `rows` tokens in a step with guesses."""
        self._most = most
        self._rows = rows
        self._sequences: dict[int, _Sequence] = {}  # by slot
        self._histories: OrderedDict[bytes, _History] = OrderedDict()  # by prompt, the least recently used first

    def guess(self, table: SlotTable, decode: Indices) -> dict[int, NDArray[np.int32]]:
        """Return guesses of the tokens that come next in slots that decode; none for a slot without a hopeful one."""
        for slot in np.flatnonzero(table.active).tolist():
            self._read(table, slot)
        room = self._rows - len(decode)
        guesses = {}
        for slot in decode.tolist():
            end = min(int(table.limit[slot]), table.max_length)
            most = min(room, self._most, end - int(table.length[slot]) - 1)
            if most > 0 and (found := self._guess(self._sequences[slot], most)):
                guesses[slot] = np.array(found, np.int32)
                room -= len(found)
        return guesses

    def note(self, slot: int, guessed: int, right: int) -> None:
        """Take note of how many of the guessed tokens of a slot were right, from the first on."""
        sequence = self._sequences[slot]
        sequence.share += 0.2 * (right / guessed - sequence.share)
        if sequence.share < HOPELESS:
            sequence.wait = RETRY

    def _guess(self, sequence: _Sequence, most: int) -> list[int]:
        if sequence.wait > 0:
            sequence.wait -= 1
            return []
        found = sequence.history.following.get(tuple(sequence.tokens[-NGRAM:]))
        if found is None:
            return []
        tokens, place = found
        # With a share p of right tokens, about p / (1 - p) of them are right before the first wrong one.
        hopeful = 2 + int(2 * sequence.share / (1.01 - sequence.share))
        # Tokens of images have negative numbers (`native.images`).
        return list(takewhile(lambda token: token >= 0, tokens[place : place + min(most, hopeful)]))

    def _read(self, table: SlotTable, slot: int) -> None:
        """Read what is new in a slot."""
        request, length = table.requests[slot], int(table.length[slot])
        sequence = self._sequences.get(slot)
        if sequence is None or sequence.request != request.id or len(sequence.tokens) > length:
            history = self._open_history(table.tokens[slot, : table.prompt[slot]].tobytes())
            sequence = self._sequences[slot] = _Sequence(request.id, history)
        tokens, history = sequence.tokens, sequence.history
        for token in table.tokens[slot, len(tokens) : length].tolist():
            if history.tokens < MOST_TOKENS:
                history.tokens += 1
                if len(tokens) >= NGRAM:
                    history.following[tuple(tokens[-NGRAM:])] = (tokens, len(tokens))
            tokens.append(token)

    def _open_history(self, prompt: bytes) -> _History:
        """Return the history of a prompt; it becomes the most recently used one."""
        history = self._histories.pop(prompt, None)
        if history is None or history.tokens >= MOST_TOKENS:
            history = _History()
        self._histories[prompt] = history
        total = sum(each.tokens for each in self._histories.values())
        while len(self._histories) > MOST_PROMPTS or (total > MOST_TOKENS_OF_ALL and len(self._histories) > 1):
            total -= self._histories.popitem(last=False)[1].tokens
        return history


@dataclass(frozen=True, slots=True)
class GuessedStep:
    """The tokens that one step computes where some are guessed: rows of slots without guesses first, then slot by slot."""

    guesses: dict[int, NDArray[np.int32]]  # by slot
    others: Indices  # slots without guesses
    chunks: list[tuple[int, int, int]]  # slot, start and stop of what is computed of each slot with guesses
    slots: Indices  # [R] of each row
    positions: Indices  # [R] in its sequence, of the token that is drawn from the row
    starts: list[int]  # first row of each slot with guesses

    @staticmethod
    def lay_out(table: SlotTable, decode: Indices, guesses: dict[int, NDArray[np.int32]]) -> "GuessedStep":
        """Write the guesses behind the sequences, and return the step that computes them and what decodes."""
        for slot, guess in guesses.items():
            table.tokens[slot, table.length[slot] : table.length[slot] + len(guess)] = guess
        others, sizes = decode[~np.isin(decode, list(guesses))], [len(guess) + 1 for guess in guesses.values()]
        lengths = table.length[list(guesses)].tolist()
        return GuessedStep(
            guesses=guesses,
            others=others,
            chunks=[(slot, n - 1, n - 1 + size) for slot, n, size in zip(guesses, lengths, sizes, strict=True)],
            slots=np.concatenate([others, np.repeat(list(guesses), sizes)]),
            positions=np.concatenate(
                [table.length[others], *(n + np.arange(size) for n, size in zip(lengths, sizes, strict=True))]
            ),
            starts=np.cumsum([len(others), *sizes])[:-1].tolist(),
        )

    def count_right(self, tokens: NDArray[np.int64]) -> list[int]:
        """Return how many guesses of each slot equal the tokens [R] that were drawn, from its first guess on."""
        right = []
        for start, guess in zip(self.starts, self.guesses.values(), strict=True):
            wrong = np.flatnonzero(tokens[start : start + len(guess)] != guess)
            right.append(int(wrong[0]) if len(wrong) else len(guess))
        return right

    def iterate_rounds(self, right: list[int]) -> Iterator[tuple[Indices, Indices]]:
        """Yield slots and rows of the tokens that are kept: the first of each slot, then the second of those with more."""
        guessed, starts = np.array(list(self.guesses)), np.array(self.starts)
        for place in range(max(right) + 1):
            kept = np.array(right) >= place
            slots, rows = guessed[kept], starts[kept] + place
            if not place:
                slots, rows = np.concatenate([self.others, slots]), np.concatenate([np.arange(len(self.others)), rows])
            yield slots, rows
