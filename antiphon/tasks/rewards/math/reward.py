r"""Mathematical equality of the boxed answer.

An answer is a *result*: a number, a closed form with roots and constants, an expression in the unknowns that the right answer
has, a list, set, tuple, interval, matrix or equation of these. What restates the question is none: `37+45` for 82, `\log_2 8`
for 3, a sum, an integral or a limit. `allow_arithmetic` lets arithmetic, roots and functions stand for their value.

What is equal: a number and a decimal of it with six places or more, 50 and 50% and 0.5 as the right answer has it, a list and
the set or tuple of the same, an equation for the unknown and its right side, a number and one with a unit (two units must
agree), a number in a base and its digits alone; text in either case. What is not: a rounding to fewer places, a tuple in
another order or in brackets of another interval, a choice of several answers, words for numbers, and an inequality where the
right answer is a set, since it may be the question repeated.

Answers are read by `answer_reader` and compared by `answer_equality`, in a time that their size bounds. Right answers that
these cannot read (sets with conditions, say) are compared by math-verify, with responses made of the same commands only.
"""

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import ground_truth, last_boxed, last_match, zero_score
from antiphon.tasks.rewards.math.answer_equality import as_set, is_name, is_rounding, same_answer, same_value
from antiphon.tasks.rewards.math.answer_reader import LONGEST, Node, UnreadableAnswerError, read_answer
from antiphon.tasks.rewards.math.answer_values import (
    NoValueError,
    evaluate,
    functions,
    is_literal,
    is_worked_out,
    unknowns,
)
from antiphon.tasks.rewards.math.notation import rewrite_notation
from antiphon.tasks.rewards.math.units import split_unit

_ANSWER_IS = r"(?i:answer is)[:\s]*\$?([^\n]*?)\$?\.?\s*(?:\n|$)"
_NUMBER = r"-?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?"
_IN_BASE = re.compile(r"([0-9A-Za-z]+)_\{?([0-9]+)\}?")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LARGE_EXPONENT = re.compile(r"\^\s*\{?\s*-?([0-9]{2,})")
_HARMLESS = {r"\frac", r"\dfrac", r"\left", r"\right", r"\pi", r"\sqrt", r"\cdot", r"\infty", r"\text"}
_BOXED = (LatexExtractionConfig(boxed_match_priority=0),)
_WORDS = re.compile(r"[A-Za-z']+|[A-Za-z']{3,}(?:-[A-Za-z']+)+")  # a-b is a difference
_TYPESETTING = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|left|right)(?![A-Za-z])|[${}\s]")


class Math:
    """1 if the answer equals the payload's, else 0."""

    def __init__(self, answer: str = "answer", require_boxed: bool = True, allow_arithmetic: bool = False) -> None:
        r"""Make the reward.

        Args:
            answer: Key of the right answer in the payload.
            require_boxed: Accept only the last `\boxed{…}`. Without, a response that has none is judged by what follows its
                last "answer is", else by its last number, which helps a model that was never taught to box, and pays for
                guessing.
            allow_arithmetic: Accept answers with arithmetic, roots and functions of numbers that are not evaluated, which
                pays for repeating the question.
        """
        self._answer = answer
        self._require_boxed = require_boxed
        self._allow_arithmetic = allow_arithmetic

    def __call__(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Score a trajectory; `ValueError` if the payload's answer cannot be read as mathematics."""
        expected = ground_truth(prompt, self._answer)
        expected = (last_boxed(expected) or expected).strip().strip("$").strip()
        given = self._find(transcript.response)
        if given is None:
            return zero_score(
                "the response has no boxed answer" if self._require_boxed else "the response has no answer"
            )
        if given == expected:
            return Score.of(1.0)
        if len(given) > LONGEST + len(expected):
            return zero_score(f"the answer has {len(given)} characters")
        problem = compare_answers(expected, given, self._allow_arithmetic)
        return zero_score(problem) if problem else Score.of(1.0)

    def _find(self, response: str) -> str | None:
        boxed = last_boxed(response)
        if boxed is not None or self._require_boxed:
            return boxed
        return last_match(_ANSWER_IS, response) or last_match(_NUMBER, response)


def compare_answers(expected: str, given: str, allow_arithmetic: bool = False) -> str:
    """Return why `given` is not the answer `expected`; an empty string if it is. `ValueError` if `expected` is none."""
    if words := _words(expected):
        if words == _words(given):
            return ""
        if len(words) > 2:  # not a product of unknowns
            return "other words"
    if _IN_BASE.fullmatch(expected) or _IN_BASE.fullmatch(given):
        return "" if _same_in_base(expected, given) else "another number, or in another base"
    return _compare_values(rewrite_notation(expected), rewrite_notation(given), allow_arithmetic)


def _compare_values(expected: str, given: str, allow_arithmetic: bool) -> str:
    expected, our_unit = split_unit(expected)
    given, their_unit = split_unit(given, attached=our_unit is not None)
    try:
        right = _read_right(expected)
    except UnreadableAnswerError:
        return "" if _equal_by_library(expected, given) else "not the right answer"
    try:
        answer = read_answer(given)
    except UnreadableAnswerError as error:
        return str(error)
    factor: Fraction | None = Fraction(1)
    if our_unit and their_unit:
        factor = their_unit.factor_to(our_unit)
        if factor is None:
            return f"the unit is {their_unit.name}, not {our_unit.name}"
    if our_unit and answer.kind == "percent":
        return f"a percentage, not {our_unit.name}"
    answer = as_set(_stated(right, answer))
    if not allow_arithmetic and not is_worked_out(answer, functions(right)):
        return "the answer leaves something to be computed"
    if factor != 1:
        answer = Node("mul", (answer, Node("number", value=factor)))
    return "" if same_answer(right, answer) else "not the right answer"


@lru_cache(1024)
def _read_right(expected: str) -> Node:
    return read_answer(expected)


def _words(answer: str) -> str:
    """Return the words that an answer is, in lower case, or its letter, in brackets or not; an empty string for mathematics."""
    bare = _TYPESETTING.sub("", answer).removesuffix(".")
    bare = bare[1:-1] if re.fullmatch(r"\([A-Za-z]\)", bare) else bare
    return (bare if len(bare) == 1 else bare.casefold()) if _WORDS.fullmatch(bare) else ""


def _same_in_base(expected: str, given: str) -> bool:
    """Compare numbers one of which names its base, as 1011_2 does: digit by digit, and their bases if both name them."""
    found = [_IN_BASE.fullmatch(text) for text in (expected, given)]
    digits = {each[1] if each else text for each, text in zip(found, (expected, given), strict=True)}
    return len(digits) == 1 and len({each[2] for each in found if each}) == 1


def _stated(right: Node, given: Node) -> Node:
    """Return what an equation, an approximation or a membership states, where the right answer is none itself."""
    if given.kind == right.kind == "list" and not any(part.kind == "relation" for part in right.parts):
        return replace(given, parts=tuple(_stated(right.parts[0], part) for part in given.parts))
    if given.kind == "list" and right.kind in {"set", "sequence"}:
        return _stated_together(right, given)
    if given.kind != "relation" or len(given.parts) != 2:
        return given
    left, value = given.parts
    if given.name == "~":
        return left if is_literal(value) and _approximates(value, left) else given
    if given.name == "in" and left.kind == "symbol":
        return value
    if right.kind != "relation" and given.name == "=" and is_name(left) and left.name not in unknowns(value):
        return value
    return given


def _stated_together(right: Node, given: Node) -> Node:
    """Return the values of equations for several unknowns; for a tuple, in the order of their names: `x=1, y=2` is (1, 2)."""
    equations = [part for part in given.parts if part.kind == "relation" and part.name == "=" and len(part.parts) == 2]
    names = [equation.parts[0].name for equation in equations if equation.parts[0].kind == "symbol"]
    if right.kind == "set":
        return (
            replace(given, parts=tuple(_stated(right.parts[0], part) for part in given.parts)) if right.parts else given
        )
    if not len(set(names)) == len(names) == len(given.parts):
        return given
    ordered = sorted(equations, key=lambda equation: equation.parts[0].name)
    return replace(given, parts=tuple(equation.parts[1] for equation in ordered))


def _approximates(decimal: Node, exact: Node) -> bool:
    """Return True if a decimal is `exact` up to its last place."""
    try:
        return same_value(exact, decimal) or is_rounding(decimal, evaluate(exact), places=1)
    except NoValueError:
        return False


def _equal_by_library(expected: str, given: str) -> bool:
    """Compare what the grammar does not know by math-verify; `given` may have no command that `expected` has not."""
    gold = _parse_right(expected)
    if not gold:
        raise ValueError(f"the right answer {expected!r} cannot be read as mathematics")
    if (
        len(given) > 2 * len(expected)
        or _exceeds(_COMMAND, given, expected)
        or _exceeds(_LARGE_EXPONENT, given, expected)
    ):
        return False
    if re.search(r"[0-9]{7}|\^\s*\{?\s*-?[0-9]{3}|!|\^[^+\-=,]*\^", given):
        return False
    return bool(verify(gold, _parse(given), timeout_seconds=None))


def _exceeds(pattern: re.Pattern[str], given: str, expected: str) -> bool:
    """Return True if a text has more of something than the right answer has, other than what costs the library nothing."""
    return not {*(Counter(pattern.findall(given)) - Counter(pattern.findall(expected)))} <= _HARMLESS


@lru_cache(1024)
def _parse_right(expected: str) -> list[Any]:
    return _parse(expected)


def _parse(expression: str) -> list[Any]:
    parsed: list[Any] = parse(f"\\boxed{{{expression}}}", extraction_config=_BOXED, parsing_timeout=None)
    return parsed
