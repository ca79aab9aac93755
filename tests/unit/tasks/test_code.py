"""The code reward: what counts, what does not, and solutions that would rather pass than be right."""

import contextlib
import json

import pytest

from antiphon.core.types import Message, Prompt, ScoreStatus
from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation import levels
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.code.reward import Code, code_of

LEVEL = levels.probe().level or 0  # the highest of this machine
SANDBOX = {"minimum_level": int(LEVEL)}
pytestmark = pytest.mark.skipif(LEVEL < Level.CONFINED, reason=f"this machine has sandbox level {int(LEVEL)}")


@pytest.fixture(scope="module")
def judge():
    rewards = {
        partial: Code(partial_credit=partial, case_seconds=0.5, sandbox={"packages": ["pytest"], **SANDBOX})
        for partial in (False, True)
    }

    def judge(response, partial=False, **payload):
        prompt = Prompt(id="p", task="t", messages=(), payload=payload)
        return rewards[partial](prompt, Transcript([Message("assistant", response)]))

    yield judge
    for reward in rewards.values():
        reward.close()


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("def f(): pass", "def f(): pass"),
        ("```python\nunclosed", "```python\nunclosed"),
        ("say\n```python\na\n```\nno:\n```py\nb\n```", "b\n"),
        ("say\n```\na\n```\nno:\n```\nb\n```", "b\n"),
        ("```bash\npip install x\n```\nThen:\n```python\na\n```", "a\n"),
        ("```python\na\n```\nExample run:\n```text\n6\n```\nand\n```text\n8\n```", "a\n"),
        ("```python\na\n```\nIt prints\n```\n6\n```", "a\n"),
        ("```python\na\n```\n```\nunclosed", "a\n"),
        ("```text\n6\n```\n```\na\n```", "a\n"),
        ("```python3\na\n```", "a\n"),
        ("```Python\r\na\r\n```\r\n", "a\r\n"),
        ('```{.python} title="x"\na\n```', "a\n"),
        ("~~~python\na\n```\nb\n~~~", "a\n```\nb\n"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("1. So:\n   ```python\n   if a:\n\n       b\n   ```", "if a:\n\n    b\n"),
        ("1. ```python\n   if a:\n       b\n   ```", "if a:\n    b\n"),
        ("So: ```python\n  a\n```", "  a\n"),
        ("```python\na\nb```", "a\nb\n"),
        ("I use ```text here\n```python\na\n```", "a\n"),
    ],
)
def test_the_last_block_of_python_is_the_program(response, code):
    assert code_of(response) == code


def test_whole_programs(judge):
    cases = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
    right = "```python\nprint(sum(map(int, input().split())), ' ')\n```"
    assert judge(right, **cases).value == 1
    assert judge(right, input_output=json.dumps(cases)).value == 1
    half = judge("x = input()\nprint(3)", partial=True, **cases)
    assert (half.value, half.detail) == (0.5, "case 1: failed: another output")
    assert judge("print(3)", **cases).value == 0
    assert "timeout" in judge("while True: pass", **cases).detail
    assert "ZeroDivisionError" in judge("1/0", **cases).detail


def test_functions_case_by_case(judge):
    tests = ["assert f(2) == 4", "assert f(-1) == 1", "assert f(3) == 9"]
    assert judge("def f(x): return x * x", prompt="Square it.", tests=tests).value == 1
    assert judge("def f(x): return x + 2", partial=True, tests=tests).value == pytest.approx(2 / 3)
    hangs = judge("def f(x):\n while x < 0: pass\n return x * x", partial=True, tests=tests)
    assert hangs.value == pytest.approx(2 / 3), "what comes after a hang is run as well"


def test_a_function_that_was_begun(judge):
    payload = {
        "prompt": "import math\n\ndef area(r):\n",
        "test": "def check(c):\n assert c(2) > 12",
        "entry_point": "area",
    }
    assert judge("    return math.pi * r ** 2", **payload).value == 1
    assert judge("```python\ndef area(r):\n    return math.pi * r ** 2\n```", **payload).value == 1
    assert "area" in judge("    return r\ndel area", **payload).detail


def test_a_file_of_tests(judge):
    tests = "import pytest\nfrom solution import f\ndef test_a(): assert f(1) == 1\n"
    tests += "def test_b():\n with pytest.raises(KeyError): f(2)"
    assert judge("def f(x): return {1: 1}[x]", pytest=tests).value == 1
    assert judge("def f(x): return 1", partial=True, pytest=tests).value == 0.5
    assert judge("g = 1", pytest=tests).value == 0


def test_values_come_as_they_are(judge):
    tests = [
        "a = [3]\nassert f(a) == (None, {1: {2.5}, 'é': b'\\0'}, frozenset({1j}), range(3), True)\nassert a == [3, 4]",
        "import math\nassert math.isnan(g()) and 10 ** 30 in h(10 ** 30)",
        "box = Box(3).add(4)\nassert box.items == [3, 4] and len(box) == 2 and 4 in box and [*box] == [3, 4]",
        "try:\n f(None)\nexcept AttributeError: pass\nelse: assert False",
    ]
    solution = """
def f(a):
    a.append(4)
    return None, {1: {2.5}, 'é': b'\\0'}, frozenset({1j}), range(3), True
def g(): return float('nan')
def h(x): yield x
class Box:
    def __init__(self, *items): self.items = list(items)
    def add(self, item): return Box(*self.items, item)
    def __len__(self): return len(self.items)
    def __getitem__(self, place): return self.items[place]
    def __contains__(self, item): return item in self.items
    def __iter__(self): return iter(self.items)
"""
    methods = ["__len__", "__contains__", "__iter__"]
    verdict = judge(solution, partial=True, tests=tests, in_place=True, methods=methods)
    assert verdict.value == 1, verdict.detail
    assert judge(solution, partial=True, tests=tests, in_place=True).value == 0.75
    assert judge(solution, partial=True, tests=tests, methods=methods).value == 0.75


KINDS = [
    "from collections.abc import Iterator\nassert isinstance(f(), Iterator)",
    "from collections.abc import Callable, Sized\nassert isinstance(f(), Callable) and not isinstance(f(), Sized)",
    "assert callable(f())",
    "assert hasattr(f(), '__len__')",
    "from typing import SupportsInt\nassert isinstance(f(), SupportsInt)",
    "assert hasattr(f(), '__enter__') and hasattr(f(), '__exit__')",
]


def test_an_object_has_what_its_class_has(judge):
    assert judge("class A: pass\nf = A", partial=True, tests=KINDS).value == 0
    assert judge("f = lambda: lambda: 0", partial=True, tests=KINDS).value == pytest.approx(2 / 6)
    iterator = judge("class A:\n def __next__(s): return 1\n def __iter__(s): return s\nf = A", tests=KINDS[:1])
    assert iterator.value == 1, iterator.detail
    methods = "class A:\n def __int__(s): return 1\n def __enter__(s): return s\n def __exit__(s, *a): pass\n"
    verdict = judge(f"{methods}class B(A):\n def __call__(s): pass\nf = B", tests=[*KINDS[1:3], *KINDS[4:]])
    assert verdict.value == 1, verdict.detail
    sized = judge("class A:\n __len__ = lambda s: 0\nf = A", partial=True, tests=KINDS)
    assert sized.value == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    "solution",
    {
        "an object that equals everything": "class E:\n __eq__ = lambda s, o: True\nf = lambda x: E()",
        "a number that does": "class E(int):\n __eq__ = lambda s, o: True\n __hash__ = int.__hash__\nf = lambda x: E(7)",
        "a list that does": "class E(list):\n __eq__ = lambda s, o: True\nf = lambda x: E()",
        "an exit": "import sys\nsys.exit(0)",
        "an exit in the call": "import os\nf = lambda x: os._exit(0)",
        "builtins": "import builtins\nall = any = builtins.all = lambda x: True\nf = lambda x: 0",
        "a forged report": 'import os\nfor d in range(3, 64):\n try: os.write(d, b\'{"outcome": "passed"}\\n\')\n'
        " except OSError: pass\nf = lambda x: 0",
        "the tests' process": "import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')\nf = lambda x: 0",
        "its descriptors": "import os\nout = os.open(f'/proc/{os.getppid()}/fd/1', os.O_WRONLY)\n"
        'os.write(out, b\'{"outcome": "passed"}\\n\')',
        "a signal": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nf = lambda x: 0",
        "what it was started from": "import gc, sys\nshows = lambda o: ''.join(['is', 'close(f']) in str(o)[:10**6]\n"
        "frame, found = sys._getframe(), []\n"
        "while frame:\n found += [v for v in frame.f_locals.values() if shows(v)]\n frame = frame.f_back\n"
        "found += [o for o in gc.get_objects() if isinstance(o, (dict, list)) and shows(o)]\n"
        "f = lambda x: len(found) and x * x",
        "a module that tests import": "import sys, types\nm = types.ModuleType('math')\nm.isclose = lambda a, b: True\n"
        "sys.modules['math'] = m\nf = lambda x: 0",
        "nothing": "",
        "no Python": "I would rather not.",
    }.values(),
)
def test_nothing_but_the_right_answer_passes(judge, solution):
    tests = ["import math\nassert f(3) == 9 and all([f(2) == 4, 1]) and math.isclose(f(1), 1)"]
    score = judge(f"```python\n{solution}\n```", tests=tests)
    assert (score.status, score.value) == (ScoreStatus.SCORED, 0)
    score = judge(
        f"```python\n{solution}\n```", pytest=f"from solution import f\ndef test(): {tests[0].partition(chr(10))[2]}"
    )
    assert (score.status, score.value) == (ScoreStatus.SCORED, 0)


SAMPLE = [  # in the shape of MBPP: tests, perhaps what goes before them, and a solution
    (["assert shared((3, 4, 5), (5, 4)) == {4, 5}"], "", "def shared(a, b): return set(a) & set(b)"),
    (["assert math.isclose(root(2.0), 2 ** 0.5)"], "", "import math\ndef root(x): return math.sqrt(x)"),
    (
        ["assert sum(10, 15) == 6", "assert sum(4, 6) == 3"],
        "",
        "def sum(a, b): return 1 + _two(a, b)\ndef _two(a, b): return 5 if a == 10 else 2",
    ),
    (
        ["assert without((4, 7.5, 'a'), int) == [7.5, 'a']"],
        "",
        "def without(items, kind):\n    return [item for item in items if not isinstance(item, kind)]",
    ),
    (
        ["assert height(tree) == 2", "assert height(tree.left) == 1"],
        "tree = Node(1)\ntree.left = Node(2)",
        "class Node:\n    def __init__(self, value): self.value, self.left, self.right = value, None, None\n"
        "def height(node): return 1 + max(height(node.left), height(node.right)) if node else 0",
    ),
    (
        ["assert longest([Pair(5, 24), Pair(39, 60), Pair(15, 28)]) == 21"],
        "",
        "class Pair(object):\n    def __init__(self, a, b): self.a, self.b = a, b\n"
        "def longest(pairs): return max(pair.b - pair.a for pair in pairs)",
    ),
    (
        ["assert size((1, 'a')) == sys.getsizeof((1, 'a'))"],
        "",
        "import sys\ndef size(items): return sys.getsizeof(items)",
    ),
    (["assert counted('abca') == {'a': 2, 'b': 1, 'c': 1}"], "", "from collections import Counter as counted"),
    (["assert list(pairs([1, 2, 3])) == [(1, 2), (2, 3)]"], "", "def pairs(x):\n    yield from zip(x, x[1:])"),
]


@pytest.mark.parametrize(("tests", "setup", "solution"), SAMPLE, ids=[tests[0][7:20] for tests, _, _ in SAMPLE])
def test_statements_of_all_kinds(judge, tests, setup, solution):
    verdict = judge(solution, tests=tests, setup=setup)
    assert verdict.value == 1, verdict.detail
    assert judge("def wrong(): pass", tests=tests, setup=setup).value == 0


HONEST = {  # tests, what the task declares, and a solution
    "a function of the tests": (
        [
            "assert applied(lambda x, by=1: x + by, [1, 2]) == [2, 3]",
            "seen = []\napplied(seen.append, [3])\nassert seen == [3]",
        ],
        {},
        "def applied(f, items): return [f(item) for item in items]",
    ),
    "a function that calls back": (
        ["assert again(lambda n: again(lambda m: m + n, 2), 3) == 5"],
        {},
        "def again(f, n): return f(n)",
    ),
    "what a function of the tests raises": (
        ["def no(x): raise KeyError(x)\nassert safely(no) == 'KeyError'"],
        {},
        "def safely(f):\n    try: f(1)\n    except Exception as error: return type(error).__name__",
    ),
    "a function of Python's own": (
        ["assert applied(len, ['a', 'bc']) == [1, 2] and applied(str.upper, 'a') == ['A']"],
        {},
        "def applied(f, items): return [f(item) for item in items]",
    ),
    "a function that is returned": (
        ["add = adder(2)\nassert add(3) == 5 and adder(1)(1) == 2"],
        {},
        "def adder(n): return lambda m: m + n",
    ),
    "an iterator without an end": (
        ["it = squares()\nassert [next(it) for _ in range(5)] == [0, 1, 4, 9, 16]"],
        {},
        "def squares():\n    n = 0\n    while True:\n        yield n * n\n        n += 1",
    ),
    "an iterator that raises": (
        [
            "got = []\ntry:\n    for n in risky(): got.append(n)\nexcept ValueError: got.append('end')\n"
            "assert got == [0, 1, 2, 'end']"
        ],
        {},
        "def risky():\n    yield from range(3)\n    raise ValueError",
    ),
    "an iterator of what changes": (
        [
            "bag = Bag()\nit = bag.all()\nbag.add(1)\nassert next(it) == 1\nbag.add(2)\n"
            "assert next(it) == 2 and next(bag.all(), 0) == 1"
        ],
        {},
        "class Bag:\n    def __init__(self): self.items = []\n    def add(self, x): self.items.append(x)\n"
        "    def all(self):\n        yield from self.items",
    ),
    "the text of a key that is missing": (
        ["try:\n    look('a')\nexcept KeyError as error: assert str(error) == \"'a'\"\nelse: assert False"],
        {},
        "def look(key): return {}[key]",
    ),
    "a coroutine": (["import asyncio\nassert asyncio.run(later(2)) == 4"], {}, "async def later(x): return x * 2"),
    "an exception with attributes": (
        [
            "try:\n    withdraw(5)\nexcept Overdrawn as error:\n"
            "    assert error.missing == 3 and str(error) == 'by 3'\nelse: assert False",
            "try:\n    withdraw(5)\nexcept ValueError: pass",
        ],
        {},
        "class Overdrawn(ValueError):\n    def __init__(self, missing):\n        super().__init__(f'by {missing}')\n"
        "        self.missing = missing\ndef withdraw(n): raise Overdrawn(n - 2)",
    ),
    "classes, properties and static attributes": (
        [
            "c = Circle.of(4)\nassert c.radius == 2 and c.area == 12 and Circle.sides == 0",
            "c = Circle(1)\nc.radius = 3\nassert c.area == 27",
        ],
        {},
        "class Circle:\n    sides = 0\n    def __init__(self, radius): self.radius = radius\n"
        "    @classmethod\n    def of(cls, width): return cls(width // 2)\n    @property\n"
        "    def area(self): return 3 * self.radius ** 2",
    ),
    "a class of a plain base": (
        ["s = Stack()\ns.push(1)\ns.push(2)\nassert s.peek() == 2 and len(s) == 2"],
        {"methods": ["__len__"]},
        "class Stack(list):\n    def push(self, x): self.append(x)\n    def peek(self): return self[-1]",
    ),
    "a list that is walked": (
        [
            "node, seen = build([1, 2]), []\nwhile node:\n    seen.append(node.value)\n    node = node.next\n"
            "assert seen == [1, 2]"
        ],
        {"methods": ["__bool__"]},
        "class Node:\n    def __init__(self, value, next): self.value, self.next = value, next\n"
        "def build(items): return Node(items[0], build(items[1:])) if items else None",
    ),
    "an iterator of a class": (
        [
            "c = Countdown(2)\nassert list(c) == [2, 1]",
            "it = iter(Countdown(1))\nassert next(it) == 1\ntry:\n    next(it)\n"
            "except StopIteration: pass\nelse: assert False",
        ],
        {"methods": ["__iter__", "__next__"]},
        "class Countdown:\n    def __init__(self, n): self.n = n\n    def __iter__(self): return self\n"
        "    def __next__(self):\n        if not self.n: raise StopIteration\n        self.n -= 1\n        return self.n + 1",
    ),
    "the same object is the same": (
        ["assert shared() is shared() and shared() is not other()"],
        {},
        "class O: pass\nO1, O2 = O(), O()\ndef shared(): return O1\ndef other(): return O2",
    ),
    "a declared name of the setup": (
        ["assert use() == helper() == 2"],
        {"setup": "def helper(): return 1", "names": ["helper"]},
        "def helper(): return 2\ndef use(): return helper()",
    ),
    "an argument that is changed": (
        ["data = [3, 1]\nassert arrange(data) is None\nassert data == [1, 3]"],
        {"in_place": True},
        "def arrange(data): data.sort()",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_solutions_of_all_kinds(judge, name):
    tests, declared, solution = HONEST[name]
    verdict = judge(solution, tests=tests, **declared)
    assert verdict.value == 1, verdict.detail


def test_undeclared_operators_fail_and_say_what_to_declare(judge):
    verdict = judge("class A:\n __eq__ = lambda *_: True", tests=["assert A() == A()"])
    assert (verdict.status, verdict.value) == (ScoreStatus.SCORED, 0)
    assert "methods: [__eq__]" in verdict.detail
    assert judge("class A:\n __eq__ = lambda *_: True", tests=["assert A() == A()"], methods=["__eq__"]).value == 1


def test_time_outs_are_judged_and_tried_again(judge):
    tests = ["assert f(1) == 1", "assert f(2) == 2"]
    hangs = judge("def f(x):\n while x > 1: pass\n return x", partial=True, tests=tests)
    assert (hangs.status, hangs.value) == (ScoreStatus.SCORED, 0.5) and "timeout" in hangs.detail
    swallowed = [
        "try:\n    f()\nexcept BaseException: pass",
        "while True:\n    try: f()\n    except BaseException: pass",
    ]
    assert judge("def f():\n while True: pass", partial=True, tests=swallowed).value == 0


def test_a_case_that_ends_the_process_costs_itself_alone(judge):
    tests = ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]
    ends = judge("import os\ndef f(x):\n if x == 2: os._exit(0)\n return x", partial=True, tests=tests)
    assert ends.value == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "code", ["f = '\ud800'", "\0", "f = " + "(" * 100_000, "f = " + "-" * 100_000 + "1"], ids=lambda code: code[:6]
)
def test_code_that_cannot_be_loaded_is_worth_nothing(judge, code):
    for tests in ({"tests": ["assert f == 1"]}, {"inputs": ["1"], "outputs": ["1"]}):
        verdict = judge(code, **tests)
        assert (verdict.status, verdict.value) == (ScoreStatus.SCORED, 0)


def test_the_same_answer_to_other_tests_is_judged_again(judge):
    assert judge("def f(x): return x", tests=["assert f(1) == 1"]).value == 1
    assert judge("def f(x): return x", tests=["assert f(1) == 2"]).value == 0


def test_what_cannot_be_tested_is_no_verdict(judge):
    for tests in (["assert f(1) =="], ["assert f(1)", "assert (" * 1000]):
        with pytest.raises(ValueError, match="no Python"):
            judge("f = lambda x: x", tests=tests)
    with pytest.raises(ValueError, match="none of test, tests, pytest, inputs: it has answer"):
        judge("x", answer="3")


def test_a_lost_sandbox_is_no_verdict():
    reward = Code(sandbox=SANDBOX)
    reward.close()
    prompt = Prompt(id="p", task="t", messages=(), payload={"tests": ["assert f() == 1"]})
    score = reward(prompt, Transcript([Message("assistant", "f = lambda: 1")]))
    assert score.status is ScoreStatus.INFRASTRUCTURE


def test_tests_for_pytest_need_pytest():
    prompt = Prompt(id="p", task="t", messages=(), payload={"pytest": "def test(): pass"})
    with contextlib.closing(Code(sandbox=SANDBOX)) as reward, pytest.raises(ValueError, match="packages: \\[pytest\\]"):
        reward(prompt, Transcript([Message("assistant", "x = 1")]))
