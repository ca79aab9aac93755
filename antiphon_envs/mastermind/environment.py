"""Mastermind in text: find a code from the answers to guesses. The best guess depends on all earlier answers."""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations, product
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from antiphon.core.rng import generator
from antiphon.tasks.environments.actions import extract_answer
from antiphon.tasks.environments.base import require
from antiphon.tasks.environments.turns import TurnBasedGame

MOST_CODES = 20_000  # that the expert searches


def score_guess(guess: str, code: str) -> tuple[int, int]:
    """Return how many digits of `guess` are in their place in `code`, and how many others are elsewhere in it.

    >>> score_guess("1123", "2143")
    (2, 1)
    """
    placed = sum(a == b for a, b in zip(guess, code, strict=True))
    return placed, sum((Counter(guess) & Counter(code)).values()) - placed


class Mastermind(TurnBasedGame):
    """Guess a code of digits, which earns 1. The state is the set of guesses with their answers."""

    class Config(TurnBasedGame.Config):
        """Options of `mastermind`."""

        length: int = Field(4, ge=1)
        """Digits of a code."""
        digits: int = Field(6, ge=2, le=9)
        """Highest digit; the lowest is 1."""
        repeats: bool = True
        """Allow a digit to occur twice in a code."""
        row_separator: str = "\n"
        turns: int = Field(10, ge=1)

        @model_validator(mode="after")
        def _check(self) -> Self:
            most = 9 if self.repeats else self.digits
            require(self.length <= most, "length", self.length, f"a whole number from 1 to {most}")
            few = self.digits**self.length <= MOST_CODES
            require(few, "length", self.length, f"such that digits ** length is at most {MOST_CODES}")
            return self

    config: Config
    name: ClassVar[str] = "mastermind"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        config = self.config
        self._digits = "123456789"[: config.digits]
        codes = (
            product(self._digits, repeat=config.length) if config.repeats else permutations(self._digits, config.length)
        )
        self._codes = tuple(map("".join, codes))

    def actions(self) -> Sequence[str]:
        """Return all codes."""
        return self._codes

    def _start(self, seed: int) -> None:
        self._code = self._codes[int(generator(seed, self.name).integers(len(self._codes)))]
        self._answers: dict[str, tuple[int, int]] = {}  # by guess
        self._possible: Sequence[str] = self._codes  # that the answers seen by the expert allow
        self._answers_seen = 0

    def _rules(self) -> str:
        repeats = "may come more than once" if self.config.repeats else "come once at most"
        return (
            f"Find a code of {self.config.length} digits from 1 to {self.config.digits}, which {repeats}. After each guess you "
            "are told how many digits are in their place, and how many others are in the code, but elsewhere."
        )

    def _describe_actions(self) -> str:
        return f"Say {self.config.length} digits, like {self._codes[len(self._codes) // 2]}."

    def _apply(self, action: str) -> float | None:
        guess = extract_answer(action).replace(" ", "")
        if len(guess) != self.config.length or not set(guess) <= set(self._digits):
            return None
        self._answers[guess] = score_guess(guess, self._code)
        return float(self._is_won())

    def _render(self) -> str:
        lines = (f"{guess} {placed} {elsewhere}" for guess, (placed, elsewhere) in self._answers.items())
        return self.config.row_separator.join(["?" * self.config.length, *lines])

    def _state_key(self) -> str:
        return ",".join(f"{guess}:{placed}+{elsewhere}" for guess, (placed, elsewhere) in sorted(self._answers.items()))

    def _is_won(self) -> bool:
        return self._code in self._answers

    def _expert_action(self) -> str:
        """Return the first code that all answers allow (Shapiro 1983)."""
        for guess, answer in list(self._answers.items())[self._answers_seen :]:
            self._possible = [code for code in self._possible if score_guess(guess, code) == answer]
        self._answers_seen = len(self._answers)
        return self._possible[0]
