"""Faults: one change each, to the last space."""

import ast
from pathlib import Path

import networkx.algorithms.cluster
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon_envs.mini_swe.mutants import all_mutants


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = (a) + b", {"x = (a) - b"}),
        ("x = a < b <= c", {"x = a <= b <= c", "x = a >= b <= c", "x = a < b < c", "x = a < b > c"}),
        ("x = a is  not b", {"x = a is b"}),
        ("x = not a and b", {"x = a and b", "x = not a or b"}),
        ("x = -1", {"x = 1", "x = -2", "x = -0"}),
        ("x -= 2.5", {"x += 2.5", "x -= 3.5", "x -= 0.0"}),
        ("f(a, b, c)", {"f(b, a, c)"}),
        ("max(*a)", {"min(*a)"}),
        ("if a.b: c", {"if not a.b: c"}),
        ('x = "é" + b', {'x = "é" - b'}),
        ("x: 'int' = True", {"x: 'int' = False"}),
        ('"""1 + 1."""', set()),
    ],
)
def test_every_fault_of_a_line(source, changed):
    assert {fault.source for fault in all_mutants(source)} == changed


def test_what_a_function_can_do_without():
    source = "def f(a):\n    a = g(a)\n    b = a\n    b = 3\n    if b:\n        raise E\n    return b\n"
    without = {fault.line for fault in all_mutants(source) if "pass" in fault.source}
    assert without == {2, 4, 6}, "the first b and the return must stay"


@pytest.fixture(scope="module")
def real():
    source = Path(networkx.algorithms.cluster.__file__).read_text()
    return source.splitlines(), all_mutants(source)


@given(st.integers(0, 10**6))
def test_nothing_before_or_after_the_fault_changes(real, draw):
    before, found = real
    fault = found[draw % len(found)]
    after = fault.source.splitlines()
    ast.parse(fault.source)
    assert after[: fault.line - 1] == before[: fault.line - 1]
    assert abs(len(after) - len(before)) < 10
    assert after[fault.line + 9 :] == before[fault.line + 9 + len(before) - len(after) :]


def test_no_fault_is_the_same_as_another(real):
    _, found = real
    assert len({fault.source for fault in found}) == len(found) > 300
