"""Mastermind in text: find a code by what is said about guesses. What to do depends on all that was said before."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import ClassVar

from antiphon.core.rng import generator
from antiphon.tasks.environments.actions import extract_answer
from antiphon.tasks.environments.options import require, require_whole
from antiphon.tasks.environments.turns import TurnBasedGame

_MOST_CODES = 20_000  # that the expert goes through


def score_guess(guess: str, code: str) -> tuple[int, int]:
    """Digits of `guess` that stand in their place in `code`, and others that it has elsewhere.

    >>> judged("1123", "2143")
    (2, 1)
    """
    placed = sum(a == b for a, b in zip(guess, code, strict=True))
    return placed, sum((Counter(guess) & Counter(code)).values()) - placed


@dataclass(kw_only=True, eq=False)
class Mastermind(TurnBasedGame):
    """Guess a code of digits, worth 1. The state is the set of guesses with what was said about them."""

    length: int = 4
    digits: int = 6
    """From 1 to this."""
    repeats: bool = True
    """Whether a digit may come twice in a code."""
    row_separator: str = "\n"
    turns: int = 10

    NAME: ClassVar[str] = "mastermind"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole(self.NAME, "digits", self.digits, 2, 9)
        require_whole(self.NAME, "length", self.length, 1, 9 if self.repeats else self.digits)
        fits = self.digits**self.length <= _MOST_CODES
        require(fits, self.NAME, "length", self.length, f"such that digits ** length is at most {_MOST_CODES}")
        digits = "123456789"[: self.digits]
        drawn = product(digits, repeat=self.length) if self.repeats else permutations(digits, self.length)
        self._codes = tuple(map("".join, drawn))

    def actions(self) -> Sequence[str]:
        """All codes."""
        return self._codes

    def _begin(self, seed: int) -> None:
        self._code = self._codes[int(generator(seed, self.NAME).integers(len(self._codes)))]
        self._said: dict[str, tuple[int, int]] = {}
        self._possible: Sequence[str] = self._codes  # to the expert, who has looked at so many guesses
        self._looked = 0

    def _rules(self) -> str:
        repeats = "may come more than once" if self.repeats else "come once at most"
        return (
            f"Find a code of {self.length} digits from 1 to {self.digits}, which {repeats}. After each guess you are told how "
            "many digits are in their place, and how many others are in the code, but elsewhere."
        )

    def _choice(self) -> str:
        return f"Say {self.length} digits, like {self._codes[len(self._codes) // 2]}."

    def _act(self, action: str) -> float | None:
        guess = extract_answer(action).replace(" ", "")
        if len(guess) != self.length or not set(guess) <= set("123456789"[: self.digits]):
            return None
        self._said[guess] = score_guess(guess, self._code)
        return float(self._won())

    def _text(self) -> str:
        told = (f"{guess} {placed} {elsewhere}" for guess, (placed, elsewhere) in self._said.items())
        return self.row_separator.join(["?" * self.length, *told])

    def _key(self) -> str:
        return ",".join(f"{guess}:{placed}+{elsewhere}" for guess, (placed, elsewhere) in sorted(self._said.items()))

    def _won(self) -> bool:
        return self._code in self._said

    def _best(self) -> str:
        """The first code that all answers allow (Shapiro 1983)."""
        for guess, answer in list(self._said.items())[self._looked :]:
            self._possible = [code for code in self._possible if score_guess(guess, code) == answer]
        self._looked = len(self._said)
        return self._possible[0]
