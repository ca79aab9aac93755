"""What tests take of a solution, told from their text alone."""

import pytest

from antiphon.tasks.rewards.code.names import find_imports, find_uses


@pytest.mark.parametrize(
    ("setup", "cases", "names", "modules"),
    [
        ("", ["assert f(1) == 2", "assert g(x=f(1))"], {"f", "g"}, {}),
        ("", ["assert set(f([1])) == {1} and len(abs(1))"], {"f"}, {}),
        ("import math\ndef near(a): return near(math.pi - a)", ["assert near(f(1))"], {"f"}, {}),
        ("", ["assert math.isclose(f(1), math.pi)"], {"f"}, {"math": "math"}),
        ("", ["assert math.isclose(math(1), 2)"], {"math"}, {}),
        ("", ["assert np.allclose(f(1), 2)"], {"f", "np"}, {}),
        ("root = Node(1)\nroot.left = Node(2)", ["assert height(root) == 2"], {"Node", "height"}, {}),
        ("", ["import os\nfor i in [1]:\n    y = [f(z) for z in os.sep]\n    assert y"], {"f"}, {}),
        ("", ["def check(c):\n    assert c(helper(2)) == 1\ncheck(f)"], {"helper", "f"}, {}),
        ("", ["def one():\n    global two\n    two = f()\none()\nassert two"], {"f"}, {}),
        ("", ["assert sum(1, 2) == 3", "assert sum(4, 5) == 9"], {"sum"}, {}),
        ("", ["assert sum([1]) == len([1])"], set(), {}),
        ("", ["assert sorted(f(1)) == [1]\nassert __builtins__"], {"f"}, {}),
    ],
)
def test_names_of_statements(setup, cases, names, modules):
    found = find_uses(setup, tuple(cases))
    assert (found.names - {"__builtins__"}, found.modules) == (names, modules)


def test_packages_are_modules():
    found = find_uses("", ("assert np.allclose(f(1), scipy.pi)",), packages=("numpy", "scipy"))
    assert (found.names, found.modules) == ({"f"}, {"np": "numpy", "scipy": "scipy"})


@pytest.mark.parametrize(
    ("tests", "names"),
    [
        ("from solution import a, b as c\ndef test(): assert a(c)", {"a", "b"}),
        ("import solution\ndef test(): assert solution.f(solution.g)", {"f", "g"}),
        ("import solution as s\ndef test(): assert s.f(other.g)", {"f"}),
        ("from solution import *\nimport math\ndef test(): assert f(math.pi) == abs(1)", {"f"}),
        ("import math\ndef test(): assert math.pi", set()),
    ],
)
def test_names_of_files(tests, names):
    assert find_imports(tests, "solution").names == names


def test_attributes_and_exceptions():
    text = """
def test():
    with pytest.raises((Full, errors.Empty)):
        queue.put(getattr(queue, "item"))
    try:
        queue.get(timeout="a b")
    except Closed as error:
        assert error.code
"""
    found = find_uses("", (text,))
    assert found.caught == {"Full", "Empty", "errors", "Closed"}
    assert found.attributes == {"raises", "Empty", "put", "item", "get", "code"}


@pytest.mark.parametrize("text", ["assert f(", "x" * 10 + " y", "(" * 1000])
def test_what_is_no_python_is_told(text):
    with pytest.raises(ValueError, match="no Python"):
        find_uses("", (text,))
    with pytest.raises(ValueError, match="no Python"):
        find_imports(text, "solution")
