r"""Mathematical equality of the boxed answer, by math-verify.

math-verify's own time limits are off: they need signals, and turn a time-out into a wrong answer. The grading pool
kills what takes too long and leaves it ungraded. An expression counts as its value, so `\boxed{37+45}` answers 82: for
bare arithmetic use `exact_match`.
"""

import logging
import re
from typing import Any

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig
from sympy import Eq

from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import last_boxed, last_match, right_answer, wrong
from antiphon.types import Prompt, Score

_BOXED = (LatexExtractionConfig(boxed_match_priority=0),)
_SAID = r"(?i:answer is)[:\s]*\$?([^\n]*?)\$?\.?\s*(?:\n|$)"
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?"


class Math:
    """1 if the answer equals the payload's, else 0."""

    def __init__(self, answer: str = "answer", require_boxed: bool = True) -> None:
        r"""`answer` is the payload's key. With `require_boxed` only the last `\boxed{…}` of the response counts.
        Without, a response that has none is judged by what follows its last "answer is", else by its last number: that
        helps a model that was never taught to box, and pays for guessing."""
        self._answer = answer
        self._require_boxed = require_boxed
        for logger in ("math_verify.parser", "math_verify.grader"):  # they warn that the time limits are off
            logging.getLogger(logger).setLevel(logging.ERROR)
        verify(_parse("1"), _parse("1"), timeout_seconds=None)  # the first call loads much: not on an answer's time

    def __call__(self, prompt: Prompt, transcript: Transcript) -> Score:
        """The verdict; `ValueError` if the payload's answer is none that math-verify can read."""
        expected = right_answer(prompt, self._answer)
        expected = (last_boxed(expected) or expected).strip().strip("$").strip()
        given = self._find(transcript.response)
        if given is None:
            return wrong("the response has no boxed answer" if self._require_boxed else "the response has no answer")
        if given == expected:
            return Score.of(1.0)
        return Score.of(_equal(expected, given))

    def _find(self, response: str) -> str | None:
        boxed = last_boxed(response)
        if boxed is not None or self._require_boxed:
            return boxed
        return last_match(_SAID, response) or last_match(_NUMBER, response)


def _parse(expression: str) -> list[Any]:
    parsed: list[Any] = parse(f"\\boxed{{{expression}}}", extraction_config=_BOXED, parsing_timeout=None)
    return parsed


def _equal(expected: str, given: str) -> bool:
    gold = _parse(expected)
    if not gold:
        raise ValueError(f"the right answer {expected!r} cannot be read as mathematics")
    answer = _parse(given)
    # Of an equation math-verify takes the right side, for "x = 5"; "7 = 5" would then answer both.
    if any(isinstance(part, Eq) and part.lhs.is_number for part in answer) and not re.search("=", expected):
        return False
    return bool(verify(gold, answer, timeout_seconds=None))
