r"""Numeric answers: 1 for the right number, else 0.

The last statement with a number counts: the content of the last `\boxed{…}`, or what follows an "answer is", "answer:" or
"####" up to the end of the sentence; or the whole response, if it is a number. Of "3 + 4 = 7" the right side counts, unless
the left one is another number. A statement must have exactly one number: "5 or 7", "≤ 5" and "x = 7 = 5" are wrong, so
guessing does not pay.
"""

import contextlib
import re
from collections.abc import Iterator
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import MOST_STATEMENT_CHARACTERS, answer_statements, ground_truth, zero_score

_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_POWER = r"(?:[eE](?P<e>[+-]?\d+)|\s*(?:×|\\times|\\cdot|\*)\s*10\s*(?:\^|\*\*)\s*\{?(?P<ten>[+-]?\d+)\}?)"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*[$€£]?\s*(?:"
    rf"(?P<mixed>\d+)?\s*\\[dt]?frac\{{(?P<top>-?\d+)\}}\{{(?P<bottom>\d+)\}}"
    rf"|(?:(?P<whole>\d+)\s+)?(?P<over>\d+)\s*/\s*(?P<under>\d+)"
    rf"|(?P<digits>{_DIGITS}){_POWER}?"
    rf")\s*(?P<percent>\\?%)?",
    re.ASCII,
)
_NO_NUMBER = re.compile(r"[<>≤≥≠≈²³^!]|\\[{}]|\\(?:le|ge|ne|lt|gt|approx|pm)(?![a-z])")


def numeric(
    prompt: Prompt,
    transcript: Transcript,
    *,
    answer: str = "answer",
    absolute: float = 0.0,
    relative: float = 0.0,
    percent: bool = True,
    require_marker: bool = True,
) -> Score:
    r"""Return 1 if the response states the number of the payload's `answer`.

    Numbers may have groups of thousands (1,234), scientific notation (1.2e3, 1.2×10^3), fractions (3/4, \frac{3}{4}, 1 1/2) and
    a currency sign; a unit behind the number is ignored.

    Args:
        prompt: Has the right answer in its payload.
        transcript: Has the response.
        answer: Key of the right answer.
        absolute: Allowed absolute error.
        relative: Allowed error relative to the right answer; the larger of the two errors is allowed. By default 1/3 is not
            0.333.
        percent: Read 50% as 0.5 instead of 50.
        require_marker: Accept only an announced answer. Without, the last number of a response counts, which helps a model that
            was never taught to announce, and pays for guessing.

    Raises:
        ValueError: The payload's answer is not one number.
    """
    with localcontext(Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN)):
        right = list(numbers(ground_truth(prompt, answer), percent))
        if len(right) != 1:
            raise ValueError(f"the right answer {ground_truth(prompt, answer)!r} is not one number")
        response = transcript.response.strip()
        stated = [response] if _NUMBER.fullmatch(response[:MOST_STATEMENT_CHARACTERS]) else answer_statements(response)
        given = next(filter(None, (_stated(each, percent) for each in stated)), [])
        if not given and not require_marker:
            given = list(numbers(response[-MOST_STATEMENT_CHARACTERS:], percent))[-1:]
        if len(given) != 1:
            return zero_score(f"the response states {len(given)} numbers as its answer")
        apart = abs(given[0] - right[0])
        return Score.of(apart <= max(Decimal(absolute), Decimal(relative) * abs(right[0])))


def _stated(statement: str, percent: bool) -> list[Decimal]:
    """Return the numbers that a statement gives for its answer; two of them if it contradicts itself or gives a range."""
    left, equals, right = statement[:MOST_STATEMENT_CHARACTERS].rpartition("=")
    found = list(numbers(right, percent))
    if found and (_NO_NUMBER.search(re.sub(r"\s*(?:\*\*|\^)\s*\{?[+-]?[0-9]+", "", right)) or "=" in left):
        return [*found, *found]
    before = list(numbers(left, percent)) if equals and re.fullmatch(r"[\s\d.,$-]*", left, re.ASCII) else []
    return found + [number for number in before if [number] != found]


def numbers(text: str, percent: bool = True) -> Iterator[Decimal]:
    """Yield the numbers in a text, in order."""
    text = re.sub("[\N{MINUS SIGN}\N{EN DASH}]", "-", text)
    for found in _NUMBER.finditer(re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)):
        with contextlib.suppress(ArithmeticError, ValueError):  # 1/0, or an exponent beyond all bounds
            value = _value(found)
            yield value / 100 if found["percent"] and percent else value


def _value(found: re.Match[str]) -> Decimal:
    top, bottom = found["top"] or found["over"], found["bottom"] or found["under"]
    if bottom:
        value = Decimal(found["mixed"] or found["whole"] or 0) + Decimal(top) / Decimal(bottom)
    else:
        value = Decimal(re.sub(r"[,{}]", "", found["digits"])).scaleb(int(found["e"] or found["ten"] or 0))
    return -value if found["sign"] == "-" else value
