r"""Numeric answers: 1 for the right number, else 0.

The last statement with a number counts: the content of the last `\boxed{…}`, or what follows an "answer is", "answer:" or
"####" up to the end of the sentence; or the whole response, if it is a number. Of "3 + 4 = 7" the right side counts, unless
the left one is another number. A statement must have exactly one number: "5 or 7", "≤ 5" and "x = 7 = 5" are wrong, so
guessing does not pay.
"""

import re
from collections.abc import Iterator
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from functools import lru_cache

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import MOST_STATEMENT_CHARACTERS, answer_statements, ground_truth, zero_score

_DIGITS = r"(?:[1-9]\d{0,2}(?:(?:,|\{,\})\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_POWER = r"(?:[eE](?P<e>[+-]?\d+)|\s*(?:×|\\times|\\cdot|\*)\s*10\s*(?:\^|\*\*)\s*\{?(?P<ten>[+-]?\d+)\}?)"
_COUNTS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*[$€£]?\s*(?:"
    rf"(?P<mixed>\d+)?\s*\\[dt]?frac\{{(?P<top>-?\d+)\}}\{{(?P<bottom>\d+)\}}"
    rf"|(?:(?P<whole>\d+)\s+)?(?P<over>\d+)\s*/\s*(?P<under>\d+)"
    rf"|(?P<digits>{_DIGITS}){_POWER}?"
    rf")(?:\s*(?:\\text\{{\s*)?(?P<count>{'|'.join(_COUNTS)})\b)?\s*(?P<percent>\\?%|per\s?cent\b)?",
    re.ASCII,
)
_TYPESETTING = r"[dt]?frac|text(?:bf|rm|it)?|math(?:rm|bf|it)|mbox|times|cdot|left|right|circ|q?quad|displaystyle|boxed"
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])(\}?)\s*(?:\^\s*\{?[23]\}?|[²³])(?!\d)|\^\s*\{?\\circ\}?")
_GAP = rf"(?:\\(?:{_TYPESETTING})(?![A-Za-z])|[\W_])*"  # between words and the number `#`
_SIGNS = (  # that make another number of it: operators, digits of other scripts, fractions, high and low digits, strokes
    r"<>≤≥≦≧⩽⩾≪≫≠≈≢≁≉∓±∉√∛∜∑∫∏π∞^_!|¬‰‱％٪¹²³¼-¾⁰-₟⅐-↋\u0300-\u036f\u20d0-\u20ff０-９"
)
_SMALL = "one|two|three|four|five|six|seven|eight|nine|ten|hundred|many"
_PARTS = "hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?"
_REFUSED = r"not|wrong|incorrect|false|impossible|excluded|ruled out"
# What makes another number, or none, of the only number of a statement: anywhere, before it, and right behind it.
_ANYWHERE = re.compile(
    rf"[{_SIGNS}]|\\[{{}}]|~~|\\(?!(?:{_TYPESETTING})(?![A-Za-z]))[A-Za-z]+"
    r"|\b(?i:or|squared|cubed|dozens?|gross|tenths|hundredths|thousandths|millionths|billionths|trillionths"
    r"|halves|thirds|fifths|sixths|sevenths|eighths|ninths"
    rf"|(?:is|are|was|be|been) (?:the |an? )?(?:{_REFUSED}))\b"
)
_BEFORE = re.compile(
    rf"[A-Za-z]$|[+-](?:\\(?:{_TYPESETTING})(?![A-Za-z])|[\s\\{{}}(),;:$~])*$|n't\b|\b(?i:"
    r"not|never|cannot|at least|at most|more|less|fewer|greater|above|below|under|up to|between|half|twice|double"
    r"|thrice|triple|opposite|except|excluding|excludes|than|anything but|besides|without|unlikely|hardly|negative of|every|any"
    r"|either|minus|negative|wrong|incorrect|false|far from|different from|unequal|nowhere near|one (?:after|before)"
    rf"|(?:{_SMALL}) times|(?:{_PARTS}|square|cube|reciprocal|inverse|multiple|divisor|factor|negation) of"
    r"|log|ln|sqrt|root|sin|cos|tan|(?:over|no)(?=\s+$))\b",
    re.DOTALL,
)
_BEHIND = re.compile(
    rf"\s?[eiknxyz](?![A-Za-z])|\s*[+-]\s*$|{_GAP}(?i:no(?=\W*$)|nope|wrong|incorrect|false|too (?:many|much|few|low|high)"
    r"|plus|minus|divided|multiplied|times (?:two|three|ten|itself)|added to|doubled|tripled|halved|inverted|reversed"
    r"|negative|factorials?|below|under|(?:in )?(?:hex|octal|binary|base)|mod(?:ulo)?|choose|xor"
    r"|to the (?:second|third|fourth|fifth|nth|power)|per ?mille|ppm|basis points|per (?:hundred|thousand|million)"
    rf"|point (?:zero|{_SMALL})|and (?:an? |one |two |three )(?:{_PARTS})"
    rf"|(?:{'|'.join(_COUNTS)}|lakh|crore|quadrillion|quintillion)s?)(?![a-z])"
    r"|\W*\w*\s?(?i:(?:is|are|was|ca|could)n't (?!it\b)|cannot\b)|\s+(?i:less|more than)\b"
)

# Written as a minus: the words, the sign of typographers, and hyphens, dashes and signs that look like it.
_MINUS = re.compile(r"\b(?i:minus|negative)\s+(?=[\d.$€£])|[\N{MINUS SIGN}\N{EN DASH}\u2010\u2011\ufe63\uff0d\u207b]")
_BRACED_MINUS = re.compile(r"(?:\\[A-Za-z]+\s*)?\{\s*-\s*\}\s*(?=[\d.$\\])")  # `{-}18`, `\text{-}18`
_DIFFERENCE = re.compile(r"\d[\s$]*-[\s$]*[\d.]")
_REFUTED = re.compile(r"=|(?:!|\\not|≠)\s*$")  # in front of the last "="


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
        right = _right_number(ground_truth(prompt, answer), percent)
        response = transcript.response.strip()
        alone = len(response) <= MOST_STATEMENT_CHARACTERS and _NUMBER.fullmatch(response)
        stated = [response] if alone else answer_statements(response)
        given = next(filter(None, (_stated(each, percent) for each in stated)), [])
        if not given and not require_marker:
            given = list(numbers(response[-MOST_STATEMENT_CHARACTERS:], percent))[-1:]
        if len(given) != 1:
            return zero_score(f"the response states {len(given)} numbers as its answer")
        apart = abs(given[0] - right)
        return Score.of(apart <= max(Decimal(absolute), Decimal(relative) * abs(right)))


@lru_cache(1024)  # the samples of a group have one right answer
def _right_number(text: str, percent: bool) -> Decimal:
    found = list(numbers(text, percent))
    if len(found) != 1 or not found[0].is_finite():
        raise ValueError(f"the right answer {text!r} is not one number")
    return found[0]


def _stated(statement: str, percent: bool) -> list[Decimal]:
    """Return the numbers that a statement gives for its answer; two of them if it contradicts itself or gives a range."""
    left, equals, right = _UNIT_POWER.sub(r"\1", statement).rpartition("=")
    right = _spell(right)
    matches = list(_NUMBER.finditer(right))
    found = [_read_number(match, percent) for match in matches]
    if len(found) > 1 or len(statement) > MOST_STATEMENT_CHARACTERS:
        return [*found, *found]
    if found and (_REFUTED.search(left) or _is_division(matches[0]) or _is_refused(right, matches[0])):
        return [*found, *found]
    is_number = equals and re.fullmatch(r"[\s\d.,$-]*", left, re.ASCII) and not _DIFFERENCE.search(left)
    before = list(numbers(left, percent)) if is_number else []
    return found + [number for number in before if [number] != found]


def numbers(text: str, percent: bool = True) -> Iterator[Decimal]:
    """Yield the numbers in a text, in order; infinity for 1/0, and for what is beyond all bounds."""
    for found in _NUMBER.finditer(_spell(text)):
        yield _read_number(found, percent)


def _read_number(found: re.Match[str], percent: bool) -> Decimal:
    try:
        value = _value(found)
    except (ArithmeticError, ValueError):
        value = Decimal("Infinity")
    return value / 100 if found["percent"] and percent else value


def _is_refused(statement: str, found: re.Match[str]) -> bool:
    """Return True if what stands around the only number of a statement makes another number of it, or none."""
    number = found[0]
    before = statement[: found.start()] + number[: len(number) - len(number.lstrip())]
    behind = number[len(number.rstrip()) :] + statement[found.end() :]
    around = f"{before}#{behind}"
    return bool(_ANYWHERE.search(around) or (before and _BEFORE.search(before)) or (behind and _BEHIND.match(behind)))


def _is_division(found: re.Match[str]) -> bool:
    """Return True for a fraction that is a whole number: a division that is still to be done."""
    if not (found["bottom"] or found["under"]):
        return False
    value = _read_number(found, percent=False)
    return value == value.to_integral_value()


def _spell(text: str) -> str:
    """Write signs and fractions as `_NUMBER` has them."""
    text = _BRACED_MINUS.sub("-", _MINUS.sub("-", text.replace("\\$", "$")))
    return re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)


def _value(found: re.Match[str]) -> Decimal:
    top, bottom = found["top"] or found["over"], found["bottom"] or found["under"]
    whole = found["mixed"] or found["whole"]
    if whole and not 0 <= int(top) < int(bottom):
        raise ValueError("no mixed number")  # 37 45/1 is a sum
    if bottom:
        value = Decimal(whole or 0) + Decimal(top) / Decimal(bottom)
    else:
        value = Decimal(re.sub(r"[,{}]", "", found["digits"])).scaleb(int(found["e"] or found["ten"] or 0))
    value = value.scaleb(_COUNTS.get(found["count"], 0))
    return -value if found["sign"] == "-" else value
