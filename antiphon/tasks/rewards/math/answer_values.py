"""Values of answers: compute them, and tell results from expressions that are not evaluated.

Rational numbers are exact; what is irrational is computed to 80 digits. `answer_equality` compares answers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any, TypeAlias

import mpmath
from mpmath import mp

from antiphon.tasks.rewards.math.answer_reader import Node

Number: TypeAlias = Any  # a Fraction where it is exact, else mpmath's mpf or mpc
Point = Mapping[str, Fraction]

DIGITS = 80  # of the computation
CLOSE = mpmath.mpf(10) ** -50  # relative; a number that an answer spells out has fewer digits than that
LARGEST_POWER = 100_000
LARGEST_FACTORIAL = 1_000
MOST_BITS = 20_000  # of an exact power
_GRID = 10**60


class NoValueError(ValueError):
    """An expression has no value, or none that can be computed in the time that an answer has."""


# --- values ----------------------------------------------------------------------------------------------------------------


def evaluate(node: Node, point: Point | None = None) -> Number:
    """Return the value of an expression whose unknowns are at `point`; `NoValueError` if it has none."""
    try:
        with mp.workdps(DIGITS):
            value = _evaluate(node, point or {})
    except (ArithmeticError, ValueError, TypeError) as error:
        raise NoValueError(str(error)) from None
    if not isinstance(value, Fraction) and mp.isnan(value):
        raise NoValueError("the value is no number")
    return value


def _evaluate(node: Node, point: Point) -> Number:
    if node.kind == "number":
        assert node.value is not None
        return node.value
    if node.kind == "symbol":
        if node.name not in point:
            raise NoValueError(f"{node.name} is unknown")
        return point[node.name]
    if node.kind == "constant":
        return {"pi": +mp.pi, "e": +mp.e, "i": mpmath.mpc(0, 1), "oo": mp.inf}[node.name]
    operation = _OPERATIONS.get(node.kind)
    if operation is None:
        raise NoValueError(f"a {node.kind} has no value")
    values = [_evaluate(part, point) for part in node.parts]
    if node.kind != "neg" and any(not isinstance(value, Fraction) and mp.isinf(value) for value in values):
        raise NoValueError("arithmetic with infinity has no value")
    return operation(*values) if node.kind != "call" else _call(node.name, values)


def real_number(value: Number) -> Any:
    """Return a number as mpmath's; `evaluate` makes exact ones fractions."""
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _both(exact: Callable[..., Number]) -> Callable[..., Number]:
    """Apply an operation exactly to rational numbers, and to floating-point numbers otherwise."""

    def apply(*values: Number) -> Number:
        if all(isinstance(value, Fraction) for value in values):
            return exact(*values)
        return exact(*map(real_number, values))

    return apply


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction) and exponent.denominator != 1:
        return _power(_root(Fraction(exponent.denominator), base), Fraction(exponent.numerator))
    if abs(real_number(exponent)) > LARGEST_POWER:
        raise NoValueError("an exponent is too large")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent.numerator)
        if bits <= MOST_BITS:
            return base**exponent.numerator
    return mp.power(real_number(base), real_number(exponent))


def _root(degree: Number, radicand: Number) -> Number:
    """Return the real root where there is one, exact if it is rational."""
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 2 <= degree <= 100:
        raise NoValueError("the degree of a root is no whole number from 2 to 100")
    n = degree.numerator
    if isinstance(radicand, Fraction):
        if radicand < 0:
            if n % 2:
                return _both(lambda value: -value)(_root(degree, -radicand))
            return mp.root(real_number(radicand), n)
        top, bottom = (_whole_root(part, n) for part in (radicand.numerator, radicand.denominator))
        if top is not None and bottom is not None:
            return Fraction(top, bottom)
    return mp.root(real_number(radicand), n)


def _whole_root(number: int, n: int) -> int | None:
    root = int(mp.nint(mp.root(number, n))) if number.bit_length() < DIGITS * 3 else 0
    return root if root**n == number else None


def _factorial(value: Number) -> Number:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= LARGEST_FACTORIAL:
        raise NoValueError("a factorial of no whole number, or of one too large")
    return Fraction(math.factorial(value.numerator))


def _binomial(n: Number, k: Number) -> Number:
    if isinstance(n, Fraction) and isinstance(k, Fraction) and 0 <= k <= n and n.denominator == k.denominator == 1:
        return _factorial(n) / (_factorial(k) * _factorial(n - k))
    raise NoValueError("a binomial coefficient of other than whole numbers")


def _mixed(whole: Fraction, part: Fraction) -> Fraction:
    if part >= 1:
        raise NoValueError("an improper fraction behind a whole number may be a sum or a product")
    return whole + part


def _divide(a: Number, b: Number) -> Number:
    if not b:
        raise NoValueError("division by zero")
    return a / b


def _call(name: str, values: Sequence[Number]) -> Number:
    if name == "binom":
        return _binomial(*values)
    if name in {"abs", "floor", "ceil"} and isinstance(values[0], Fraction):
        return abs(values[0]) if name == "abs" else Fraction(getattr(math, name)(values[0]))
    reals = [real_number(value) for value in values]
    if name in {"exp", "sinh", "cosh"} and abs(reals[0]) > LARGEST_POWER:
        raise NoValueError("an exponent is too large")
    if name in _BY_NAME and abs(reals[0]) > mpmath.mpf(10) ** 30:
        raise NoValueError("an argument is too large")
    if name in {"ln", "log", "lg"}:
        base = reals[1] if len(reals) > 1 else {"ln": mp.e, "log": mp.e, "lg": 10}[name]
        value = mp.log(reals[0], base) if name != "log" or len(reals) > 1 else mp.log(reals[0])
        nearest = mp.nint(value.real) if mp.im(value) == 0 else None
        return Fraction(int(nearest)) if nearest is not None and abs(value - nearest) < CLOSE else value
    return _BY_NAME[name](reals[0])


_BY_NAME: dict[str, Callable[..., Number]] = {
    **{name: getattr(mp, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")},
    **{f"arc{name}": getattr(mp, f"a{name}") for name in ("sin", "cos", "tan")},
    **{"abs": abs, "floor": mp.floor, "ceil": mp.ceil},
}
_OPERATIONS: dict[str, Callable[..., Number]] = {
    "add": _both(lambda *terms: sum(terms[1:], terms[0])),
    "mixed": _mixed,
    "mul": _both(lambda a, b: a * b),
    "div": _both(_divide),
    "neg": _both(lambda value: -value),
    "percent": _both(lambda value: value / 100),
    "degrees": lambda value: value,
    "pow": _power,
    "root": _root,
    "factorial": _factorial,
    "call": lambda *values: values[0],
}


# --- what is still to be worked out ------------------------------------------------------------------------------------------


def unknowns(node: Node) -> frozenset[str]:
    """Return the names of unknowns in an answer."""
    return frozenset(part.name for part in node.walk() if part.kind == "symbol")


def functions(node: Node) -> frozenset[str]:
    """Return what an answer leaves to be computed: functions, factorials, powers of numbers, by name."""
    parts = list(node.walk())
    found = {part.name if part.kind == "call" else part.kind for part in parts if part.kind in _WORK}
    found |= _POWERS if found & _POWERS else set()
    return frozenset(found | {WHOLE_QUOTIENT} if any(map(_is_whole_quotient, parts)) else found)


WHOLE_QUOTIENT = "a fraction that is a whole number"
_WORK = {"call", "factorial", "pow"}
_POWERS = {"exp", "pow"}


def is_worked_out(node: Node, allowed: frozenset[str]) -> bool:
    """Return True if an answer is a result.

    Rational numbers are written as one number, in irrational ones no two terms or factors could be put together, and no
    function is left but those `allowed`, which the right answer has too.
    """
    if node.kind in _COLLECTIONS:
        return all(is_worked_out(part, allowed) for part in node.parts)
    if unknowns(node):
        return True  # compared with a right answer that has the same
    if is_literal(node):
        return WHOLE_QUOTIENT in allowed or not any(map(_is_whole_quotient, node.walk()))
    if any(part.name == "oo" or part.kind == node.kind == "neg" for part in node.parts):
        return node.kind == "neg" and node.parts[0].name == "oo"
    try:
        if _is_rational(evaluate(node)) and node.kind not in allowed and node.name not in allowed:
            return False
    except NoValueError:
        return False
    if node.kind == "call" and node.name not in allowed:
        return False
    if node.kind == "add" and any(_is_rational_ratio(a, b) for a, b in combinations(node.parts, 2)):
        return False
    if node.kind == "mul" and _can_be_multiplied(list(_factors(node))):
        return False
    return all(is_worked_out(part, allowed) for part in node.parts)


_COLLECTIONS = {"list", "set", "sequence", "union", "matrix", "relation", "plusminus"}


def is_literal(node: Node) -> bool:
    """Return True for a rational number that is written as one.

    It is an integer, a decimal, a fraction, a mixed number, a percentage, or one of these times a power of ten.
    """
    if node.kind in {"neg", "percent", "degrees"}:
        return is_literal(node.parts[0]) and node.parts[0].kind != node.kind
    if node.kind == "mul":
        return node.parts[0].kind in {"number", "neg"} and is_literal(node.parts[0]) and _is_power_of_ten(node.parts[1])
    if node.kind == "div":
        return all(
            part.kind == "number" or (part.kind == "neg" and part.parts[0].kind == "number") for part in node.parts
        )
    if node.kind == "mixed":
        top, bottom = node.parts[1].parts
        return (top.value or 0) < (bottom.value or 0)  # 37\frac{45}{1} is a sum
    return node.kind == "number" or _is_power_of_ten(node)


def _is_whole_quotient(node: Node) -> bool:
    """Return True for a fraction that is a whole number: a division that is still to be done."""
    if node.kind != "div":
        return False
    try:
        value = evaluate(node)
    except NoValueError:
        return False
    return isinstance(value, Fraction) and value.denominator == 1


def _is_power_of_ten(node: Node) -> bool:
    if node.kind != "pow" or node.parts[0].value != 10:
        return False
    exponent = node.parts[1]
    return exponent.kind == "number" or (exponent.kind == "neg" and exponent.parts[0].kind == "number")


def _factors(node: Node) -> Iterator[Node]:
    for part in node.parts:
        yield from _factors(part) if part.kind == "mul" else [part]


def _can_be_multiplied(factors: Sequence[Node]) -> bool:
    if sum(is_literal(factor) for factor in factors) > 1:
        return True
    return any(a.kind == b.kind == "root" or (a == b and a.name != "") for a, b in combinations(factors, 2))


def _is_rational_ratio(a: Node, b: Node) -> bool:
    """Return True if two terms are multiples of one number, as 2 and 3 or √2 and √8 are."""
    with mp.workdps(DIGITS):
        one, other = real_number(evaluate(a)), real_number(evaluate(b))
        if not one or not other:
            return True
        return _is_rational(one / other)


def _is_rational(value: Number) -> bool:
    """Return True for a rational number, exact or computed, as 82π/π is."""
    with mp.workdps(DIGITS):
        if isinstance(value, Fraction) or mp.isinf(value) or abs(mp.im(value)) > CLOSE:
            return isinstance(value, Fraction)
        near = real_number(Fraction(int(mp.nint(mp.re(value) * _GRID)), _GRID).limit_denominator(10**9))
        return bool(abs(mp.re(value) - near) < CLOSE)
