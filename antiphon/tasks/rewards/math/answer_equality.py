"""Equality of answers: of values, exactly or at points drawn for the pair, and of lists, sets, intervals and relations.

Nothing is simplified, so the time that a comparison takes is bounded by the size of the answers, which `answer_reader` bounds.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from mpmath import mp

from antiphon.tasks.rewards.math.answer_reader import Node
from antiphon.tasks.rewards.math.answer_values import (
    CLOSE,
    DIGITS,
    NoValueError,
    Number,
    Point,
    evaluate,
    real_number,
    unknowns,
)

POINTS = 6  # at which expressions in unknowns are compared
ENOUGH_PLACES = 6  # with so many after the point, a decimal stands for what it is a rounding of


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
    for number in range(4 * POINTS):
        point = _draw_point(draw, names, number)
        try:
            one = evaluate(right, point)
        except NoValueError:
            continue
        if mp.im(real_number(one)) and "i" not in {part.name for part in right.walk()}:
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


def _draw_point(draw: random.Random, names: Sequence[str], number: int) -> Point:
    """Return a point, every third one far from 0, where `|x+4|` is not `x+4`, and of all signs in turn."""
    nearest, farthest = (1000, 3000) if number % 3 == 2 else (1, 300)
    return {
        name: Fraction(draw.randint(nearest, farthest) * (-1) ** (number >> place & 1), 97)
        for place, name in enumerate(names)
    }


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
        with mp.workdps(DIGITS):  # at fewer digits, equal ratios would be too far apart for `_near`
            ratios.append(real_number(other) / real_number(one))
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
        a, b = real_number(one), real_number(other)
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
        error, allowed = abs(real_number(exact) - real_number(value)), mp.mpf(10) ** -decimal.places
        return bool(
            error < min(allowed, abs(real_number(exact)) * mp.mpf(10) ** -(places // 2))
        )  # 0.000000 rounds nothing


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
        if _names_unknowns(right) and not all(part.kind == "relation" for part in given.parts):
            return given.kind != "set" and bool(given.parts) and _in_order(right.parts, given.parts)
        if given.kind in _UNORDERED or (right.kind == "list" and given.kind == "sequence"):
            return _matched(right.parts, given.parts)
        return len(right.parts) == 1 and same_answer(right.parts[0], given)
    if given.kind == "set" and len(given.parts) == 1:
        return same_answer(right, given.parts[0])
    if right.kind in {"sequence", "matrix", "union"}:
        if given.kind != right.kind or given.name != right.name:
            return right.name == "()" and given.kind == "list" and _in_order(right.parts, given.parts)
        return (_matched if right.kind == "union" else _in_order)(right.parts, given.parts)
    return same_value(right, given)


_UNORDERED = {"list", "set"}


def _names_unknowns(answer: Node) -> bool:
    """Return True for relations of different unknowns: bare values say by their order alone which belongs to which."""
    if not all(part.kind == "relation" for part in answer.parts):
        return False
    return len({part.parts[0] if part.name == "=" else _unknown_of(part) for part in answer.parts}) > 1


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
    if left.kind == "mul" and not left.name and left.parts[0].kind == "symbol" and left.parts[1].kind == "number":
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
