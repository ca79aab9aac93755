"""The code reward: what counts, what does not, and solutions that would rather pass than be right."""

import contextlib
import json

import pytest

from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.code import Code, code_of
from antiphon.types import Message, Prompt, ScoreStatus


@pytest.fixture(scope="module")
def judge():
    rewards = {
        partial: Code(partial_credit=partial, case_seconds=0.5, sandbox={"packages": ["pytest"]})
        for partial in (False, True)
    }

    def judge(response, partial=False, **payload):
        prompt = Prompt(id="p", task="t", messages=(), payload=payload)
        return rewards[partial](prompt, Transcript([Message("assistant", response)]))

    yield judge
    for reward in rewards.values():
        reward.close()


def test_the_last_block_is_the_program():
    assert code_of("say\n```python\na\n```\nno:\n```\nb\n```") == "b\n"
    assert code_of("def f(): pass") == "def f(): pass"


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
    verdict = judge(solution, partial=True, tests=tests)
    assert verdict.value == 1, verdict.detail


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
        "what it was started from": "import gc, sys\nneedle = 'is' + 'close(f'\nframe, found = sys._getframe(), []\n"
        "while frame:\n found += [v for v in frame.f_locals.values() if needle in str(v)]\n frame = frame.f_back\n"
        "found += [o for o in gc.get_objects() if isinstance(o, (dict, list)) and needle in str(o)[:10**6]]\n"
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


def test_what_cannot_be_tested_is_no_verdict(judge):
    two = judge("class A: pass", tests=["assert A() == A()"])
    sent = judge("f = lambda g: g(1)", tests=["assert f(lambda x: x) == 1"])
    assert two.status is sent.status is ScoreStatus.UNGRADED
    with pytest.raises(ValueError, match="none of test, tests, pytest, inputs: it has answer"):
        judge("x", answer="3")


def test_a_lost_sandbox_is_no_verdict():
    reward = Code()
    reward.close()
    prompt = Prompt(id="p", task="t", messages=(), payload={"tests": ["assert f() == 1"]})
    score = reward(prompt, Transcript([Message("assistant", "f = lambda: 1")]))
    assert score.status is ScoreStatus.INFRASTRUCTURE


def test_tests_for_pytest_need_pytest():
    prompt = Prompt(id="p", task="t", messages=(), payload={"pytest": "def test(): pass"})
    with contextlib.closing(Code()) as reward, pytest.raises(ValueError, match="packages: \\[pytest\\]"):
        reward(prompt, Transcript([Message("assistant", "x = 1")]))
