"""The tool `calculator`: exact arithmetic by a parser of its own, which runs no code and bounds time and size."""

import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Never

from antiphon.tasks.environments.tools.toolbox import ToolError

MOST_CHARACTERS = 400  # characters of an expression
MOST_DEPTH = 40  # of nested parentheses and signs
MOST_BITS = 2000  # of a numerator or denominator

_TOKEN = re.compile(r"\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<sign>\*\*|//|[-+*/%()^]))")
_LEVELS: tuple[dict[str, Callable[[Fraction, Fraction], Fraction]], ...] = (  # lowest precedence first
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {"*": lambda a, b: a * b, "/": lambda a, b: a / b, "//": lambda a, b: Fraction(a // b), "%": lambda a, b: a % b},
)


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression with numbers, + - * / // (whole division) % (remainder) ** (power) and parentheses."""
    try:
        value = _Parser(expression).parse()
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    if value.denominator == 1:
        return str(value.numerator)
    number = Context(prec=12).divide(Decimal(value.numerator), Decimal(value.denominator))
    return format(number.normalize(), "g")


class _Parser:
    """A recursive-descent parser; ** binds tighter than a sign before it and is right-associative."""

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARACTERS:
            raise ToolError(f"the expression has {len(text)} characters, more than {MOST_CHARACTERS}")
        self._text, self._at, self._depth = text.rstrip(), 0, 0
        self._number: str | None = None
        self._sign: str | None = None
        self._advance()

    def parse(self) -> Fraction:
        """Return the value of the whole expression."""
        value = self._chain(0)
        if self._number or self._sign:
            self._fail()
        return value

    def _advance(self) -> None:
        """Read the next token; at the end both `_number` and `_sign` are None."""
        self._number = self._sign = None
        if self._at == len(self._text):
            return
        found = _TOKEN.match(self._text, self._at)
        if not found:
            self._fail()
        self._number, self._sign, self._at = found["number"], found["sign"], found.end()

    def _fail(self) -> Never:
        rest = self._text[max(self._at - 1, 0) :][:20]
        raise ToolError(f"this is no arithmetic, from {rest!r} on" if rest else "the expression is empty")

    def _chain(self, level: int) -> Fraction:
        """Evaluate operators of one level, left to right."""
        if level == len(_LEVELS):
            return self._signed()
        value = self._chain(level + 1)
        while self._sign in _LEVELS[level]:
            operator = _LEVELS[level][self._sign]
            self._advance()
            value = _check_size(operator(value, self._chain(level + 1)))
        return value

    def _signed(self) -> Fraction:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise ToolError(f"more than {MOST_DEPTH} parentheses or signs are in each other")
        if self._sign in ("+", "-"):
            factor = -1 if self._sign == "-" else 1
            self._advance()
            value = factor * self._signed()
        else:
            value = self._power()
        self._depth -= 1
        return value

    def _power(self) -> Fraction:
        base = self._atom()
        if self._sign not in ("**", "^"):
            return base
        self._advance()
        exponent = self._signed()
        if exponent.denominator != 1:
            raise ToolError("an exponent has to be a whole number")
        size = max(abs(base.numerator), base.denominator).bit_length()
        if size > 1 and size * abs(exponent.numerator) > MOST_BITS:
            raise ToolError("a number becomes too large")
        return Fraction(base**exponent.numerator)

    def _atom(self) -> Fraction:
        if self._number:
            value = _check_size(Fraction(self._number))
            self._advance()
            return value
        if self._sign != "(":
            self._fail()
        self._advance()
        value = self._chain(0)
        if self._sign != ")":
            raise ToolError("a parenthesis is not closed")
        self._advance()
        return value


def _check_size(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator).bit_length() > MOST_BITS:
        raise ToolError("a number becomes too large")
    return value
