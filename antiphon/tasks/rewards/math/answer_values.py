"""Values of answers: compare two answers, and tell results from expressions that are not evaluated.

Rational numbers are exact; what is irrational is computed to 80 digits, and what has unknowns at points drawn for the pair.
Nothing is simplified, so the time that a comparison takes is bounded by the size of the answers, which `answer_reader` bounds.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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
POINTS = 6  # at which expressions in unknowns are compared
ENOUGH_PLACES = 6  # with so many after the point, a decimal stands for what it is a rounding of
LARGEST_POWER = 100_000
LARGEST_FACTORIAL = 1_000
MOST_BITS = 20_000  # of an exact power


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


def _real(value: Number) -> Any:
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _both(exact: Callable[..., Number]) -> Callable[..., Number]:
    """Apply an operation exactly to rational numbers, and to floating-point numbers otherwise."""

    def apply(*values: Number) -> Number:
        if all(isinstance(value, Fraction) for value in values):
            return exact(*values)
        return exact(*map(_real, values))

    return apply


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction) and exponent.denominator != 1:
        return _power(_root(Fraction(exponent.denominator), base), Fraction(exponent.numerator))
    if abs(_real(exponent)) > LARGEST_POWER:
        raise NoValueError("an exponent is too large")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent.numerator)
        if bits <= MOST_BITS:
            return base**exponent.numerator
    return mp.power(_real(base), _real(exponent))


def _root(degree: Number, radicand: Number) -> Number:
    """Return the real root where there is one, exact if it is rational."""
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 2 <= degree <= 100:
        raise NoValueError("the degree of a root is no whole number from 2 to 100")
    n = degree.numerator
    if isinstance(radicand, Fraction):
        if radicand < 0:
            if n % 2:
                return _both(lambda value: -value)(_root(degree, -radicand))
            return mp.root(_real(radicand), n)
        top, bottom = (_whole_root(part, n) for part in (radicand.numerator, radicand.denominator))
        if top is not None and bottom is not None:
            return Fraction(top, bottom)
    return mp.root(_real(radicand), n)


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


def _divide(a: Number, b: Number) -> Number:
    if not b:
        raise NoValueError("division by zero")
    return a / b


def _call(name: str, values: Sequence[Number]) -> Number:
    if name == "binom":
        return _binomial(*values)
    if name in {"abs", "floor", "ceil"} and isinstance(values[0], Fraction):
        return abs(values[0]) if name == "abs" else Fraction(getattr(math, name)(values[0]))
    reals = [_real(value) for value in values]
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
    "mixed": _both(lambda whole, part: whole + part),
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
        if isinstance(evaluate(node), Fraction) and node.kind not in allowed and node.name not in allowed:
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
        one, other = _real(evaluate(a)), _real(evaluate(b))
        if not one or not other:
            return True
        ratio = one / other
        if abs(mp.im(ratio)) > CLOSE:
            return False
        found = Fraction(int(mp.nint(mp.re(ratio) * _GRID)), _GRID).limit_denominator(10**9)
        return bool(abs(mp.re(ratio) - _real(found)) < CLOSE)


_GRID = 10**60


# --- comparison --------------------------------------------------------------------------------------------------------------


def same_value(right: Node, given: Node) -> bool:
    """Return True if two expressions have the same value, at every point that is tried if they have unknowns."""
    names = sorted(unknowns(right))
    if not unknowns(given) <= set(names):
        return False
    if not names:
        return any(
            _close(one, other, right, given) for one in _readings(right, given) for other in _readings(given, right)
        )
    draw, compared = random.Random(f"{right}\0{given}"), 0
    for _ in range(4 * POINTS):
        point = {name: Fraction(draw.randint(-300, 300), 97) for name in names}
        try:
            one = evaluate(right, point)
        except NoValueError:
            continue
        if mp.im(_real(one)) and "i" not in {part.name for part in right.walk()}:
            continue  # the right answer is none there
        try:
            if not _near(one, evaluate(given, point)):
                return False
        except NoValueError:
            return False
        compared += 1
        if compared == POINTS:
            return True
    return compared > 1


def _proportional(right: Sequence[Node], given: Sequence[Node]) -> bool:
    """Return True if two equations say the same: the differences of their sides have one ratio everywhere."""
    ours, theirs = (Node("add", (a, Node("neg", (b,)))) for a, b in (right, given))
    names = sorted(unknowns(ours))
    if set(names) != unknowns(theirs):
        return False
    draw, ratios = random.Random(f"{right}\0{given}"), []
    for _ in range(POINTS):
        point = {name: Fraction(draw.randint(-300, 300), 97) for name in names}
        try:
            one, other = evaluate(ours, point), evaluate(theirs, point)
        except NoValueError:
            continue
        if _near(one, Fraction(0)) or _near(other, Fraction(0)):
            if _near(one, other):
                continue  # the point solves both
            return False
        ratios.append(_real(other) / _real(one))
    return len(ratios) > 1 and all(_near(ratio, ratios[0]) for ratio in ratios)


def _readings(node: Node, other: Node) -> list[Number]:
    """Return the value of an answer; of a percentage also the number before the sign, if the other answer has no sign."""
    try:
        values = [evaluate(node)]
    except NoValueError:
        return []
    if node.kind == "percent" and other.kind != "percent":
        values.append(evaluate(node.parts[0]))
    return values


def _close(one: Number, other: Number, right: Node, given: Node) -> bool:
    return _near(one, other) or is_rounding(given, one) or is_rounding(right, other)


def _near(one: Number, other: Number) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    with mp.workdps(DIGITS):
        a, b = _real(one), _real(other)
        if mp.isinf(a) or mp.isinf(b):
            return bool(a == b)
        return bool(abs(a - b) <= CLOSE * max(abs(a), abs(b), 1))


def is_rounding(node: Node, exact: Number, places: int = ENOUGH_PLACES) -> bool:
    """Return True if `node` is a decimal of at least `places` that rounds `exact`, a number without a finite decimal."""
    negative = node.kind == "neg"
    decimal = node.parts[0] if negative else node
    if decimal.kind != "number" or decimal.places < places or decimal.value is None:
        return False
    if isinstance(exact, Fraction) and _is_decimal(exact):
        return False
    value = -decimal.value if negative else decimal.value
    with mp.workdps(DIGITS):
        return bool(abs(_real(exact) - _real(value)) < mp.mpf(10) ** -decimal.places)


def _is_decimal(value: Fraction) -> bool:
    left = value.denominator
    for prime in (2, 5):
        while left % prime == 0:
            left //= prime
    return left == 1


def same_answer(right: Node, given: Node) -> bool:
    """Return True if two answers are the same: values, or what is made of them."""
    right, given = as_set(right), as_set(given)
    if right.kind == "relation":
        return _same_relation(right, given)
    if given.kind == "relation":
        return False
    if right.kind in _UNORDERED:
        if given.kind in _UNORDERED or (right.kind == "list" and given.kind == "sequence"):
            return _matched(right.parts, given.parts)
        return len(right.parts) == 1 and same_answer(right.parts[0], given)
    if given.kind == "set" and len(given.parts) == 1:
        return same_answer(right, given.parts[0])
    if right.kind in {"sequence", "matrix", "union"}:
        if given.kind != right.kind or given.name != right.name:
            return right.kind == "sequence" and given.kind == "list" and _in_order(right.parts, given.parts)
        return (_matched if right.kind == "union" else _in_order)(right.parts, given.parts)
    return same_value(right, given)


_UNORDERED = {"list", "set"}


def as_set(node: Node) -> Node:
    """Write a value with ± as the set of both, and in a list as two items."""
    if not any(part.kind == "plusminus" for part in node.walk()):
        return node
    if node.kind in _UNORDERED:
        items = [as_set(part) for part in node.parts]
        return replace(
            node, parts=tuple(each for item in items for each in (item.parts if item.kind == "set" else [item]))
        )
    return Node("set", (_with_sign(node, "plus"), _with_sign(node, "neg")))


def _with_sign(node: Node, sign: str) -> Node:
    if node.kind == "plusminus":
        return Node("neg", node.parts) if sign == "neg" else node.parts[0]
    return replace(node, parts=tuple(_with_sign(part, sign) for part in node.parts))


def _same_relation(right: Node, given: Node) -> bool:
    if right.name == "!=":
        return given.name == "!=" and _in_order(right.parts, given.parts)
    if right.name == "in":
        return same_answer(right.parts[1], given)
    if right.name == "=":
        if given.kind == "relation":
            return given.name == "=" and _proportional(right.parts, given.parts)
        return is_name(right.parts[0]) and same_answer(right.parts[1], given)
    ours = _interval(right)
    if given.kind == "relation":
        if _unknown_of(right) != _unknown_of(given):
            return False
        theirs = _interval(given)
    else:
        theirs = given
    return ours is not None and theirs is not None and same_answer(ours, theirs)


def is_name(left: Node) -> bool:
    """Return True for what an equation gives a value to: `x`, `f(x)`, `(x, y)`, `AB`, `|AB|`, `A:B`; not for an expression."""
    if left.kind == "mul" and left.parts[0].kind == "symbol" and left.parts[1].kind == "number":
        return True  # f(2)
    return all(
        (part.kind in _NAMES and part.name in {"", "abs", "()"}) or part.kind == "symbol" for part in left.walk()
    )


_NAMES = {"mul", "div", "call", "sequence", "list"}


def _unknown_of(relation: Node) -> frozenset[str]:
    return frozenset(part.name for part in relation.parts if part.kind == "symbol")


def _interval(relation: Node) -> Node | None:
    """Return the interval that an inequality for one unknown describes; None if it is none, or has to be solved first."""
    infinity = Node("constant", name="oo")
    if len(relation.parts) == 3 and unknowns(relation.parts[1]):
        first, second = relation.name.split()
        brackets = ("[" if "=" in first else "(") + ("]" if "=" in second else ")")
        return Node("sequence", (relation.parts[0], relation.parts[2]), brackets)
    if len(relation.parts) != 2 or relation.name not in _TURNED:
        return None
    (left, other), name = relation.parts, relation.name
    if other.kind == "symbol":
        left, other, name = other, left, _TURNED[name]
    if left.kind != "symbol" or unknowns(other):
        return None
    if "<" in name:
        return Node("sequence", (Node("neg", (infinity,)), other), "(" + ("]" if "=" in name else ")"))
    return Node("sequence", (other, infinity), ("[" if "=" in name else "(") + ")")


_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def _in_order(right: Sequence[Node], given: Sequence[Node]) -> bool:
    return len(right) == len(given) and all(map(same_answer, right, given))


def _matched(right: Sequence[Node], given: Sequence[Node]) -> bool:
    """Return True if two lists have the same items, in whatever order and however often."""
    pairs = [
        [(one.kind == "set") == (other.kind == "set") and same_answer(one, other) for other in given] for one in right
    ]
    return all(map(any, pairs)) and all(map(any, zip(*pairs, strict=True))) and bool(right) == bool(given)
