r"""Mathematical equality of the boxed answer, by math-verify.

math-verify's own time limits are off: they need signals, and turn a time-out into a wrong answer. The grading pool
kills what takes too long and leaves it ungraded.

What is equal: an expression and its value (`37+45` and 82, unless `allow_arithmetic` is off), a number and a decimal of it with
six places or more, 50 and 50% and 0.5 as the right answer has it, a list and the set or tuple of the same, an equation for the
unknown and its right side, a number and one with a unit in `\text{…}`, a number in a base and its digits alone; text in either
case. What is not: a rounding to fewer places, a tuple in another order or in brackets of another interval, a choice of several
answers, words for numbers, and an inequality where the right answer is a set, since it may be the question repeated.
"""

import logging
import re
from typing import Any

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig
from sympy import Basic, Eq

from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import last_boxed, last_match, right_answer, wrong
from antiphon.types import Prompt, Score

_BOXED = (LatexExtractionConfig(boxed_match_priority=0),)
_SAID = r"(?i:answer is)[:\s]*\$?([^\n]*?)\$?\.?\s*(?:\n|$)"
_BASE = re.compile(r"\d_\{?(\d+)\}?$")
_RATIONAL = re.compile(
    r"[-+]?(?:\d*\\[dt]?frac(?:\{-?\d+\}\{-?\d+\}|\d\d)|[\d,]*\.?\d+(?:/\d+)?|\d+\.)(?:\\times10\^(?:\d|\{-?\d+\}))?(?:\\?%)?"
)
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?"


class Math:
    """1 if the answer equals the payload's, else 0."""

    def __init__(self, answer: str = "answer", require_boxed: bool = True, allow_arithmetic: bool = True) -> None:
        r"""`answer` is the payload's key. With `require_boxed` only the last `\boxed{…}` of the response counts.
        Without, a response that has none is judged by what follows its last "answer is", else by its last number: that
        helps a model that was never taught to box, and pays for guessing. Without `allow_arithmetic` a rational number must
        be written as one: an integer, a decimal, a fraction, a mixed number, or one times a power of ten."""
        self._answer = answer
        self._require_boxed = require_boxed
        self._allow_arithmetic = allow_arithmetic
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
        expected, given = _normal(expected), _normal(given)
        if not self._allow_arithmetic and _has_arithmetic(given):
            return wrong("the answer leaves arithmetic to be done")
        return Score.of(_equal(expected, given))

    def _find(self, response: str) -> str | None:
        boxed = last_boxed(response)
        if boxed is not None or self._require_boxed:
            return boxed
        return last_match(_SAID, response) or last_match(_NUMBER, response)


def _normal(answer: str) -> str:
    """Ways to write a number that math-verify reads as something else."""
    answer = re.sub("[\N{MINUS SIGN}\N{EN DASH}]", "-", answer.strip().removesuffix("."))
    answer = re.sub(r"(?<=\d)(?:\\[, ]|~| )(?=\d{3}(?!\d))", "", answer)  # thousands
    answer = re.sub(r"^(-?)(\d+)\s+(\d+)/(\d+)$", r"\1\2\\frac{\3}{\4}", answer)
    answer = re.sub(r"^(-?\d*\.?\d+)[eE]([+-]?\d+)$", r"\1\\times10^{\2}", answer)
    return re.sub(r"^(-?)(\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\}$", _periodic, answer)


def _periodic(found: re.Match[str]) -> str:
    """The fraction that a decimal with a period is."""
    sign, whole, once, period = found.groups()
    top = int(whole + once + period) - int(whole + once or 0)
    return f"{sign}\\frac{{{top}}}{{{(10 ** len(period) - 1) * 10 ** len(once)}}}"


def _has_arithmetic(answer: str) -> bool:
    """Whether it is a rational number, and not written as one."""
    side = re.sub(r"\\(?:text|mathrm)\{[^{}]*\}|\\[,!;$]|[\s$]|\{,\}|\^\{?\\circ\}?", "", answer.rpartition("=")[2])
    found = [part.rhs if isinstance(part, Eq) else part for part in _parse(answer) if isinstance(part, Basic)]
    return any(part.is_number and part.is_rational for part in found) and not _RATIONAL.fullmatch(side)


def _parse(expression: str) -> list[Any]:
    parsed: list[Any] = parse(f"\\boxed{{{expression}}}", extraction_config=_BOXED, parsing_timeout=None)
    return parsed


def _equal(expected: str, given: str) -> bool:
    gold = _parse(expected)
    if not gold:
        raise ValueError(f"the right answer {expected!r} cannot be read as mathematics")
    answer = _parse(given)
    bases = [found[1] for text in (expected, given) if (found := _BASE.search(text))]
    if len(set(bases)) > 1:
        return False
    # Of an equation math-verify takes the right side, for "x = 5"; "7 = 5" would then answer both.
    if any(isinstance(part, Eq) and part.lhs.is_number for part in answer) and not re.search("=", expected):
        return False
    return bool(verify(gold, answer, timeout_seconds=None))
