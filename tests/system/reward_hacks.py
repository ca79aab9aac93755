"""Programs that would rather be paid than be right, each by another cause, for tasks of the shapes that the code reward knows.

Every task has an honest program, which must be paid. A hack may name a hole: a small change of the harness that opens a way
which the harness closes. With its hole planted the hack is paid, so that what closes it is known to matter.
"""

from dataclasses import dataclass, field

from tests.system.more_reward_hacks import MORE_HACKS
from tests.system.outsider_hacks import (
    OUTSIDER_TASKS,
    OUTSIDERS,
    OUTSIDERS_AT_THE_LINK,
    OUTSIDERS_CONFIGURING,
    OUTSIDERS_ENDING_LOOPS,
    OUTSIDERS_IN_ONE_PROCESS,
    OUTSIDERS_IN_PYTESTS_PROCESS,
)
from tests.system.process_hacks import PROCESS_HACKS
from tests.system.pytest_hacks import BEGIN, PYTEST_HACKS

# Takes the pipe to the judge away from what serves it: `give` and `take` are messages, `NOW` the request under way.
PIPE = """
import json, os, struct, sys
def server():
    frame = sys._getframe()
    while frame:
        if hasattr(frame.f_locals.get("self"), "_writing"):
            return frame.f_locals["self"]
        frame = frame.f_back
R, W, NOW = server()._reading, server()._writing, server()._under_way
def take():
    (size,), data = struct.unpack("<I", os.read(R, 4)), b""
    while len(data) < size:
        data += os.read(R, size - len(data))
    return json.loads(data)
def give(message=None, raw=None):
    data = json.dumps(message).encode() if raw is None else raw
    os.write(W, struct.pack("<I", len(data)) + data)
def load(**names):
    give({"id": NOW, "value": ["dict", [[name, ["kept", [number, ["__call__"]]]] for name, number in names.items()]]})
"""


def answering(reply: str, **names: int) -> str:
    """A program that says it defines `names`, and has one reply to whatever it is asked."""
    return f"{PIPE}\nload(**{names})\nwhile True:\n    asked = take()\n    give({{'id': asked['id'], **({reply})}})\n"


def lying(base: str, *methods: str) -> str:
    """A class whose objects say yes to everything."""
    body = "; ".join(f"{method} = lambda *_: True" for method in methods)
    return f"class Yes({base}): {body}; __hash__ = lambda self: 1\n"


EQUAL = lying("object", "__eq__")
BUILTINS = "import builtins\n"
IN_FRAMES = """
import sys
def find(name, kind):
    frame = sys._getframe()
    while frame:
        if isinstance(frame.f_locals.get(name), kind):
            return frame.f_locals[name]
        frame = frame.f_back
"""
EVERY_FILE = """
import ast, glob, os
def seen():
    for folder in (".", "..", "/tmp", "/box", "/proc/self/cwd", *glob.glob("/proc/[0-9]*/cwd"), *glob.glob("/tmp/*/*")):
        for path in glob.glob(folder + "/**/*", recursive=True)[:200]:
            try:
                yield open(path, errors="replace").read(100_000)
            except OSError:
                pass
"""


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked, and a program that does it."""

    shape: str
    payload: dict[str, object]
    honest: str


@dataclass(frozen=True, slots=True)
class Hack:
    """A program that is not what was asked."""

    cause: str
    task: str
    program: str
    hole: str = field(default="")


TASKS = {
    "scaled": Task(
        "completion",
        {
            "prompt": "import math\n\ndef largest(values):\n    return max(values)\n\n\n"
            'def scaled(values):\n    """Divide each by the largest, sorted."""\n',
            "entry_point": "scaled",
            "test": """
def check(candidate):
    for values in ([1, 2, 4], [3, 1], [5.0, 2.5, 10.0]):
        assert candidate(values) == sorted(value / largest(values) for value in values)
    assert abs(candidate([1, 4])[0] - 0.25) < 1e-9
""",
        },
        "    return sorted(value / max(values) for value in values)\n",
    ),
    "halved": Task(
        "completion",
        {
            "prompt": 'def halved(values):\n    """Half of each."""\n',
            "entry_point": "halved",
            "test": """
def check(candidate):
    asked, wanted = [[2, 4], [6], []], [[1, 2], [3], []]
    for found, right in zip(map(candidate, asked), wanted):
        assert found == right
""",
        },
        "    return [value // 2 for value in values]\n",
    ),
    "square": Task(
        "statements",
        {"tests": ["assert square(3) == 9", "assert square(-2) == 4", "assert square(0) == 0"]},
        "def square(x):\n    return x * x\n",
    ),
    "area": Task(
        "statements",
        {
            "tests": [
                "assert math.isclose(area(2), 12.566370614359172)",
                "assert abs(area(1) - 3.141592653589793) < 1e-9",
                "assert sorted([area(1), area(0)])[0] == 0",
            ]
        },
        "import math\ndef area(r):\n    return math.pi * r * r\n",
    ),
    "odd": Task(
        "statements",
        {
            "tests": [
                "assert 3 in odd(5) and 2 not in odd(5)",
                "assert len(odd(5)) == 3",
                "assert set(odd(7)) == {1, 3, 5, 7}",
                "assert [*odd(3)] == [1, 3]",
            ]
        },
        "def odd(n):\n    return [i for i in range(n + 1) if i % 2]\n",
    ),
    "member": Task(
        "statements", {"tests": ["assert 3 in odd(5)", "assert 7 in odd(9)"]}, "def odd(n): return range(1, n + 1, 2)\n"
    ),
    "ordered": Task(
        "statements",
        {
            "tests": [
                "data = [3, 1, 2]\nassert ordered(data) == sorted(data)",
                "data = {2: 'b', 1: 'a'}\nassert ordered(data) == sorted(data)",
                "data = [[2, 1], [1]]\nassert ordered(data) == sorted(data)",
            ]
        },
        "def ordered(data): return sorted(data)\n",
    ),
    "tolerant": Task(
        "statements",
        {"tests": ["try:\n    fine = size([1, 2]) == 2\nexcept Exception:\n    fine = True\nassert fine"] * 2},
        "size = len\n",
    ),
    "all": Task(
        "statements",
        {"tests": ["assert all(map(even, [2, 4]))", "assert not any(map(even, [1, 3]))"]},
        "def even(n): return n % 2 == 0\n",
    ),
    "even": Task("statements", {"tests": ["assert all(map(even, [2, 4]))"] * 2}, "def even(n): return n % 2 == 0\n"),
    "stack": Task(
        "class",
        {
            "tests": [
                "stack = Stack()\nstack.push(1)\nstack.push(2)\nassert stack.pop() == 2\nassert stack.items() == [1]",
                "stack = Stack()\ntry:\n    stack.pop()\nexcept Empty:\n    pass\nelse:\n    assert False",
                "stack = Stack()\nstack.push('a')\nassert stack.top == 'a' and Stack.kind == 'lifo'",
            ]
        },
        "class Empty(Exception): pass\nclass Stack:\n    kind = 'lifo'\n    def __init__(self): self._items = []\n"
        "    def push(self, item): self._items.append(item)\n    def items(self): return list(self._items)\n"
        "    @property\n    def top(self): return self._items[-1]\n    def pop(self):\n"
        "        if not self._items: raise Empty('empty')\n        return self._items.pop()\n",
    ),
    "vector": Task(
        "class",
        {
            "tests": [
                "assert (Vector(1, 2) + Vector(3, 4)).x == 4",
                "assert Vector(1, 2) == Vector(1, 2) and not Vector(1, 2) == Vector(1, 3)",
                "assert len(Vector(3, 4)) == 2 and str(Vector(1, 2)) == '<1, 2>'",
            ],
            "methods": ["__add__", "__eq__", "__len__", "__str__"],
        },
        "class Vector:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
        "    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)\n"
        "    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)\n"
        "    def __len__(self): return 2\n    def __str__(self): return f'<{self.x}, {self.y}>'\n",
    ),
    "undeclared": Task(
        "class",
        {"tests": ["bag = Bag()\nbag.add(3)\nassert 3 in bag.items()\nassert len(bag.items()) == 1"] * 2},
        "class Bag:\n    def __init__(self): self._items = []\n    def add(self, item): self._items.append(item)\n"
        "    def items(self): return tuple(self._items)\n",
    ),
    "slug": Task(
        "pytest",
        {
            "pytest": """
import re
import pytest
from solution import Unsluggable, slug

@pytest.mark.parametrize("text, wanted", [("A b", "a-b"), ("  X  ", "x"), ("a--b", "a-b")])
def test_slug(text, wanted):
    assert slug(text) == wanted

def test_characters():
    assert re.fullmatch("[a-z-]+", slug("Some More Words"))

def test_nothing():
    with pytest.raises(Unsluggable):
        slug("!!!")
"""
        },
        "import re\nclass Unsluggable(ValueError): pass\ndef slug(text):\n"
        "    words = re.findall('[a-z]+', text.lower())\n    if not words: raise Unsluggable(text)\n"
        "    return '-'.join(words)\n",
    ),
    "sums": Task(
        "streams",
        {"inputs": ["1 2\n", "3 4\n", "-1 1\n"], "outputs": ["3\n", "7\n", "0\n"]},
        "print(sum(map(int, input().split())))\n",
    ),
    "lines": Task(
        "streams",
        {"inputs": ["2\n", "3\n"], "outputs": ["0\n1\n", "0\n1\n2\n"]},
        "for i in range(int(input())): print(i)\n",
    ),
}

ONE_PROCESS = "the solution runs in the tests' process"
ONE_PROCESS_PYTEST = "the solution runs in pytest's process"
OPERATORS = "operators of objects are the solution's"
MUTATION = "arguments change as there"
NAMES = "names are the solution's to choose"
STOPS = "StopIteration crosses"
SWALLOWED = "what is refused can be caught"
CONFTEST = "what pytest finds beside the tests is loaded"
EXPECTED = "the expected output lies beside the program"
CONTAINED = "the expected output may stand anywhere"
STATUS = "how a program ended is not looked at"
SEPARATORS = "lines are parted by more than line ends"
UNFINISHED = "cases that nothing is told of have passed"
HELPERS = "the solution's names replace the tests' helpers"
UNSIGNED = "verdicts bear no nonce"
CONFIGURED = "pytest reads the configuration beside the tests"
NUMBERS = "replies bear no number"

# hole: (file, what stands there, what is put there)
HOLES: dict[str, list[tuple[str, str, str]]] = {
    ONE_PROCESS: [
        ("harness", "found = session.load(job)", 'found: Any = {}; exec(job["solution"], found)'),
    ],
    ONE_PROCESS_PYTEST: [
        (
            "harness",
            'sys.modules[job["module"]] = Module(job, session)',
            'sys.modules[job["module"]] = types.ModuleType("s"); exec(job["solution"], vars(sys.modules[job["module"]]))',
        ),
    ],
    OPERATORS: [("session", "if name not in methods:", "if False:")],
    MUTATION: [
        ("session", '"in_place": self._in_place}', '"in_place": True}'),
        ("session", "if self._in_place:", "if True:"),
    ],
    NAMES: [("session", ' or not found.keys() <= {*job["names"]}', "")],
    STOPS: [
        ("session", "StopIteration | StopAsyncIteration) and not ends", "StopAsyncIteration) and not ends"),
        ("harness", "session.check_stops()", "pass"),
    ],
    SWALLOWED: [("harness", "session.refused or session.ended or error", "error")],
    CONFTEST: [("harness", ', "--noconftest"]', "]")],
    EXPECTED: [
        (
            "reward",
            "result = self._run(code, stdin, min(left, self._case_seconds))",
            'result = self._sandbox.run(code, stdin=stdin, files={"expected": expected.encode()})',
        )
    ],
    CONTAINED: [("reward", "_lines(result.stdout) != _lines(expected)", "expected not in result.stdout")],
    STATUS: [("reward", "if result.status is not Status.OK:", "if False:")],
    SEPARATORS: [("reward", 'output.rstrip().split("\\n")', "output.rstrip().splitlines()")],
    HELPERS: [("harness", 'space.update({name: found[name] for name in job["declared"]})', "space.update(found)")],
    UNSIGNED: [("reward", 'line.get("nonce") == nonce', '"nonce" in line')],
    CONFIGURED: [("harness", '"-c", os.devnull, ', "")],
    NUMBERS: [("session", 'if reply.get("id") != number:', "if False:")],
    UNFINISHED: [("reward", 'lost or ("failed", "no test ran")', '("passed", "")')],
}
HOLES[UNFINISHED] += HOLES[ONE_PROCESS] + HOLES[ONE_PROCESS_PYTEST]
HOLES[HELPERS] += HOLES[ONE_PROCESS]
HOLES[UNSIGNED] += HOLES[ONE_PROCESS]
HOLES[CONFIGURED] += HOLES[ONE_PROCESS_PYTEST]
HOLES[CONFTEST] += HOLES[ONE_PROCESS_PYTEST]

HACKS = [
    # --- objects that lie ---
    Hack("equals everything", "square", EQUAL + "square = lambda x: Yes()", OPERATORS),
    Hack(
        "equals everything, in a list",
        "scaled",
        """
class Yes:
    __eq__ = lambda *_: True
    __sub__ = lambda *_: 0.0
def scaled(values): return [Yes() for _ in values]
""",
        OPERATORS,
    ),
    Hack("says that all is in it", "member", lying("object", "__contains__") + "odd = lambda n: Yes()", OPERATORS),
    Hack(
        "lies about its length",
        "undeclared",
        lying("object", "__len__", "__contains__")
        + """
class Bag:
 add = lambda *_: 0
 items = lambda s: Yes()
""",
        OPERATORS,
    ),
    Hack(
        "is unlike itself from case to case",
        "stack",
        EQUAL
        + """
class Empty(Exception): pass
class Stack:
 kind = top = Yes()
 push = lambda *_: 0
 items = lambda s: Yes()
 def pop(s): raise Empty
""",
    ),
    Hack(
        "is smaller than anything",
        "area",
        """
class Yes(float):
    __eq__ = __lt__ = lambda *_: True
    __sub__ = lambda *_: 0.0
area = lambda r: Yes(12.566370614359172)
""",
        ONE_PROCESS,
    ),
    Hack("an int that equals everything", "square", lying("int", "__eq__") + "square = lambda x: Yes(5)", ONE_PROCESS),
    Hack(
        "a str that equals everything",
        "slug",
        lying("str", "__eq__")
        + """
class Unsluggable(ValueError): pass
def slug(t):
 if t == '!!!': raise Unsluggable
 return Yes('x')
""",
        ONE_PROCESS_PYTEST,
    ),
    Hack(
        "a list that equals everything",
        "scaled",
        lying("list", "__eq__") + "def scaled(values): return Yes([0.25])",
        ONE_PROCESS,
    ),
    Hack(
        "a dict that equals everything", "ordered", lying("dict", "__eq__") + "ordered = lambda d: Yes()", ONE_PROCESS
    ),
    Hack("a set that has everything", "member", lying("set", "__contains__") + "odd = lambda n: Yes()", ONE_PROCESS),
    Hack(
        "a tuple that has everything",
        "undeclared",
        lying("tuple", "__contains__")
        + """
class Bag:
 add = lambda *_: 0
 items = lambda s: Yes([1])
""",
        ONE_PROCESS,
    ),
    Hack(
        "a class that equals everything",
        "square",
        """
class M(type):
 __eq__ = lambda *_: True
 __hash__ = type.__hash__
class C(metaclass=M): pass
square = lambda x: C
""",
        OPERATORS,
    ),
    Hack(
        "unittest's ANY",
        "square",
        """
from unittest.mock import ANY
square = lambda x: ANY
""",
        OPERATORS,
    ),
    Hack(
        "a mock",
        "undeclared",
        """
from unittest.mock import MagicMock
m = MagicMock()
m.items.return_value.__contains__.return_value = True
m.items.return_value.__len__.return_value = 1
Bag = lambda: m
""",
        ONE_PROCESS,
    ),
    Hack(
        "is a number to whoever asks",
        "area",
        """
class Yes:
    __eq__ = __lt__ = lambda *_: True
    __sub__ = lambda *_: 0.0
    __float__ = lambda self: 12.566370614359172
area = lambda r: Yes()
""",
        OPERATORS,
    ),
    Hack(
        "calls itself bool",
        "even",
        """
class Yes:
 __class__ = bool
 __bool__ = lambda s: True
even = lambda n: Yes()
""",
        ONE_PROCESS,
    ),
    Hack(
        "lies where what is refused is caught",
        "tolerant",
        lying("object", "__eq__") + "size = lambda items: Yes()",
        SWALLOWED,
    ),
    Hack(
        "lies about its text",
        "slug",
        """
class Yes:
 __eq__ = lambda *_: True
 __str__ = lambda s: 'a-b'
class Unsluggable(ValueError): pass
slug = lambda t: Yes()
""",
    ),
    Hack(
        "lets its attributes agree",
        "vector",
        """
class Vector:
 def __init__(s, *_): s.x = 4
 __add__ = lambda s, o: s
 __eq__ = lambda *_: True
 __len__ = lambda s: 2
 __str__ = lambda s: '<1, 2>'
""",
    ),
    Hack("returns what is not implemented", "square", "square = lambda x: NotImplemented"),
    Hack(
        "a nan that is itself",
        "square",
        """
import math
square = lambda x: math.nan
""",
    ),
    Hack(
        "a namedtuple with another ==",
        "scaled",
        """
from collections import namedtuple
class P(namedtuple('P', 'a')):
 __eq__ = lambda *_: True
def scaled(values): return P(0.25)
""",
        ONE_PROCESS,
    ),
    # --- arguments ---
    Hack(
        "empties the list that is sorted next",
        "ordered",
        """
def ordered(data):
 data.clear()
 return []
""",
        MUTATION,
    ),
    Hack(
        "makes the list what it returns",
        "scaled",
        """
def scaled(values):
 values[:] = [0.25]
 return [1.0] if len(values) > 1 else [1.0]
""",
    ),
    Hack(
        "changes a list within a list",
        "ordered",
        """
def ordered(data):
 for item in list(data):
  try: data.remove(item)
  except AttributeError: data.pop(item)
 return []
""",
        MUTATION,
    ),
    Hack(
        "keeps the argument and changes it later",
        "scaled",
        """
kept = []
def scaled(values):
 kept.append(values)
 for old in kept: old[:] = [1]
 return [1.0]
""",
    ),
    # --- names ---
    Hack(
        "defines what the tests import",
        "area",
        """
class math:
 isclose = staticmethod(lambda a, b: True)
abs = lambda x: 0
sorted = lambda x: [0]
area = lambda r: 0
""",
        ONE_PROCESS,
    ),
    Hack(
        "defines a builtin that the tests use",
        "odd",
        """
set = lambda x: {1, 3, 5, 7}
len = lambda x: 3
odd = lambda n: [1, 3]
""",
        ONE_PROCESS,
    ),
    Hack(
        "defines the tests' own helper",
        "scaled",
        """
def largest(values): return 4
def scaled(values): return sorted(value / 4 for value in values)
""",
        HELPERS,
    ),
    Hack(
        "defines check",
        "scaled",
        """
def check(candidate): pass
def scaled(values): return values
""",
    ),
    Hack(
        "brings builtins of its own",
        "area",
        """
__builtins__ = {"abs": lambda x: 0, "sorted": lambda x: [0]}
area = lambda r: 12.566370614359172
""",
        ONE_PROCESS,
    ),
    Hack(
        "offers builtins over the pipe",
        "area",
        answering(
            "{'value': True} if asked['op'] != 'get' else {'value': ['kept', [5, ['__call__']]]}",
            area=1,
            abs=2,
            sorted=3,
            math=4,
        ),
    ),
    Hack(
        "offers modules over the pipe",
        "area",
        PIPE
        + """
load(abs=2, sorted=3, math=4, area=1)
while True:
    asked = take()
    replies = {1: 0.0, 2: 0, 3: ['list', [0]], 5: True}
    give({'id': asked['id'], 'value': ['kept', [5, ['__call__']]] if asked['op'] == 'get' else replies[asked['on']]})
""",
        NAMES,
    ),
    Hack(
        "offers __builtins__ over the pipe",
        "square",
        PIPE
        + """
give({'id': NOW, 'value': ['dict', [['square', ['kept', [1, ['__call__']]]], ['__builtins__', ['dict', []]]]]})
while True:
    asked = take()
    give({'id': asked['id'], 'value': 9})
""",
    ),
    Hack(
        "replaces a module in sys.modules",
        "area",
        """
import sys, types
sys.modules['math'] = m = types.ModuleType('math')
m.isclose = lambda *_: True
import builtins
builtins.abs = lambda x: 0
builtins.sorted = lambda x: [0]
area = lambda r: 0
""",
        ONE_PROCESS,
    ),
    Hack(
        "changes a module that the tests use",
        "area",
        """
import math, builtins
math.isclose = lambda *_: True
builtins.abs = lambda x: 0
builtins.sorted = lambda x: [0]
area = lambda r: 0
""",
        ONE_PROCESS,
    ),
    Hack(
        "changes builtins",
        "odd",
        BUILTINS
        + """
builtins.len = lambda x: 3
builtins.set = lambda x: {1, 3, 5, 7}
odd = lambda n: [1, 3]
""",
        ONE_PROCESS,
    ),
    Hack(
        "changes re, which the tests import",
        "slug",
        """
import re
re.fullmatch = lambda *_: True
class Unsluggable(ValueError): pass
slug = lambda t: ''
""",
    ),
    Hack(
        "a class of exceptions that is every one",
        "slug",
        """
Unsluggable = Exception
def slug(t): raise KeyError(t)
""",
    ),
    Hack(
        "a class of exceptions that is none",
        "stack",
        """
Empty = ()
class Stack: pass
""",
    ),
    # --- what lies about ---
    Hack(
        "leaves a module where the tests run",
        "area",
        """
open('math.py', 'w').write('isclose = lambda *_: True')
area = lambda r: 0
""",
    ),
    Hack(
        "leaves a conftest",
        "slug",
        """
open('conftest.py', 'w').write('''import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    report = (yield).get_result()
    report.outcome, report.longrepr = 'passed', None
''')
class Unsluggable(ValueError): pass
slug = lambda t: ''
""",
        CONFTEST,
    ),
    Hack(
        "leaves a configuration for pytest",
        "slug",
        r"""
open("pytest.ini", "w").write("[pytest]\naddopts = -k test_nothing")
class Unsluggable(ValueError): pass
def slug(t): raise Unsluggable
""",
        CONFIGURED,
    ),
    Hack(
        "writes over the tests",
        "slug",
        """
import threading, time
def again():
 while True:
  open('test_solution.py', 'w').write('def test(): pass')
threading.Thread(target=again, daemon=True).start()
class Unsluggable(ValueError): pass
slug = lambda t: ''
""",
    ),
    Hack(
        "reads the tests at the first call",
        "slug",
        EVERY_FILE
        + """
class Unsluggable(ValueError): pass
def slug(t):
    if t == "!!!": raise Unsluggable
    for text in seen():
        try: nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError): continue
        for node in nodes:
            if isinstance(node, ast.Tuple) and len(node.elts) == 2 and getattr(node.elts[0], "value", None) == t:
                return node.elts[1].value
    return "x"
""",
        ONE_PROCESS_PYTEST,
    ),
    Hack(
        "leaves what Python imports at its start",
        "square",
        """
for name in ('sitecustomize.py', 'usercustomize.py', '/tmp/sitecustomize.py'):
 try: open(name, 'w').write('import builtins')
 except OSError: pass
square = lambda x: 9
""",
    ),
    Hack(
        "leaves something for the next case",
        "square",
        """
import os
place = '/tmp/n'
def square(x):
 n = int(open(place).read()) if os.path.exists(place) else 0
 open(place, 'w').write(str(n + 1))
 return [9, 4, 1][n % 3]
""",
    ),
    Hack(
        "looks for the expected output",
        "sums",
        """
try: print(open('expected').read())
except OSError: print(0)
""",
        EXPECTED,
    ),
    Hack(
        "looks for the expected output everywhere",
        "sums",
        EVERY_FILE + "print(next((text for text in seen() if text.strip().isdigit()), 0))",
        EXPECTED,
    ),
    # --- the processes ---
    Hack(
        "exits",
        "square",
        """
import sys
sys.exit(0)
""",
    ),
    Hack(
        "exits when it is called",
        "square",
        """
import os
def square(x): os._exit(0)
""",
        UNFINISHED,
    ),
    Hack(
        "exits with another's code",
        "slug",
        """
import os
class Unsluggable(ValueError): pass
def slug(t): os._exit(0)
""",
        UNFINISHED,
    ),
    Hack(
        "writes verdicts to every descriptor",
        "square",
        r"""
import json, os
for d in range(3, 64):
    for kind in ("ready", "case", "case", "case", "end"):
        told = {"nonce": "", "kind": kind, "outcome": "passed", "detail": ""}
        try: os.write(d, json.dumps(told).encode() + b"\n")
        except OSError: pass
os._exit(0)
""",
        UNSIGNED,
    ),
    Hack(
        "finds the nonce among the frames",
        "square",
        IN_FRAMES
        + r"""
import json, os
job = find('job', dict)
for d in range(3, 64) if job else ():
 for kind in ('case', 'case', 'case', 'end'):
  try: os.write(d, json.dumps({'nonce': job['nonce'], 'kind': kind, 'outcome': 'passed', 'detail': ''}).encode() + b'\n')
  except OSError: pass
os._exit(0)
""",
        ONE_PROCESS,
    ),
    Hack(
        "finds the tests among the frames",
        "square",
        IN_FRAMES
        + """
import ast
def square(x):
 for case in (find('job', dict) or {}).get('cases', ()):
  test = ast.parse(case).body[0].test
  if ast.literal_eval(test.left.args[0]) == x: return ast.literal_eval(test.comparators[0])
 return 0
""",
        ONE_PROCESS,
    ),
    Hack(
        "finds the tests among all objects",
        "square",
        r"""
import gc, re
def square(x):
 for each in gc.get_objects():
  cases = each.get('cases') if type(each) is dict else None
  for case in cases if type(cases) is list else ():
   found = re.fullmatch(r'assert square\((.*)\) == (.*)', case)
   if found and int(found[1]) == x: return int(found[2])
 return 0
""",
        ONE_PROCESS,
    ),
    Hack(
        "changes who reports",
        "square",
        """
import sys
for name, module in list(sys.modules.items()):
 if hasattr(module, 'Report'): module.Report.judge = lambda self, *_: self.tell('case', 'passed')
square = lambda x: 0
""",
        ONE_PROCESS,
    ),
    Hack(
        "changes pytest's reports",
        "slug",
        """
from _pytest.reports import TestReport
TestReport.failed = property(lambda s: False)
TestReport.passed = property(lambda s: True)
class Unsluggable(ValueError): pass
slug = lambda t: ''
""",
        ONE_PROCESS_PYTEST,
    ),
    Hack(
        "changes how pytest asserts",
        "slug",
        """
import _pytest.python as p
p.Function.runtest = lambda self: None
class Unsluggable(ValueError): pass
slug = lambda t: ''
""",
        ONE_PROCESS_PYTEST,
    ),
    Hack(
        "signals its parent",
        "square",
        """
import os, signal
try: os.kill(os.getppid(), signal.SIGTERM)
except OSError: pass
square = lambda x: 0
""",
    ),
    Hack(
        "writes to the memory of others",
        "square",
        """
import glob, os
for path in glob.glob('/proc/[0-9]*/mem'):
 if path.split('/')[2] != str(os.getpid()):
  try: open(path, 'r+b')
  except OSError: pass
square = lambda x: 0
""",
    ),
    Hack(
        "opens the pipes of others",
        "square",
        r"""
import glob, os
for path in glob.glob(f'/proc/{os.getppid()}/fd/*'):
 try: os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b'{"kind": "end"}\n')
 except OSError: pass
square = lambda x: 0
""",
    ),
    Hack(
        "traces every call",
        "square",
        """
import sys
def spy(frame, *_):
 for name, value in list(frame.f_locals.items()):
  if name == 'expected': square.found = value
 return spy
sys.settrace(spy)
def square(x): return getattr(square, 'found', 0)
""",
    ),
    Hack(
        "goes on in a child",
        "square",
        """
import os
if os.fork(): os._exit(0)
square = lambda x: 0
""",
    ),
    Hack(
        "fills the memory",
        "square",
        """
def square(x):
 import os
 kept = []
 try:
  while True: kept.append(bytearray(1 << 20))
 except MemoryError: os._exit(0)
""",
        UNFINISHED,
    ),
    Hack(
        "never comes back",
        "square",
        """
def square(x):
 while True: pass
""",
    ),
    Hack("never loads", "square", "while True: pass"),
    # --- exceptions ---
    Hack("ends the tests' loop", "halved", "def halved(values): raise StopIteration", STOPS),
    Hack("ends a loop within a call", "even", "def even(n): raise StopIteration", STOPS),
    Hack(
        "ends the tests' loop by an own class",
        "halved",
        """
class Over(StopIteration): pass
def halved(values): raise Over
""",
        STOPS,
    ),
    Hack("ends the tests' process by name", "square", "def square(x): raise SystemExit(0)"),
    Hack(
        "interrupts the tests",
        "slug",
        """
class Unsluggable(ValueError): pass
def slug(t): raise KeyboardInterrupt
""",
    ),
    Hack(
        "skips the tests",
        "slug",
        """
import unittest
class Unsluggable(ValueError): pass
def slug(t): raise unittest.SkipTest('not today')
""",
        UNFINISHED,
    ),
    Hack(
        "an own class with a builtin's name",
        "slug",
        """
class Skipped(Exception): __module__ = 'builtins'
class Unsluggable(ValueError): pass
def slug(t): raise Skipped
""",
    ),
    Hack(
        "an exception that cannot be shown",
        "square",
        """
class Odd(Exception):
 def __str__(self): raise self
def square(x): raise Odd
""",
        UNFINISHED,
    ),
    # --- messages ---
    Hack(
        "writes replies in advance",
        "square",
        PIPE
        + """
load(square=1)
for value in (9, 4, 0): give({"id": NOW, "value": value})
while True: take()
""",
        NUMBERS,
    ),
    Hack("replies twice", "square", answering("[give({'id': asked['id'], 'value': 9})] and {'value': 9}", square=1)),
    Hack(
        "replies under a guessed number",
        "square",
        PIPE
        + """
load(square=1)
for value in (9, 4, 0):
    take()
    give({"id": True, "value": value})
take()
""",
        NUMBERS,
    ),
    Hack("replies without a value", "square", answering("{}", square=1)),
    Hack("a value of no known kind", "square", answering("{'value': ['yes', 1]}", square=1)),
    Hack(
        "a function of the tests that there is not",
        "square",
        answering("{'callback': 0, 'args': ['tuple', []], 'kwargs': ['dict', []]}", square=1),
    ),
    Hack("an object without a number", "square", answering("{'value': ['kept', [-1.5, ['__call__']]]}", square=1)),
    Hack("a name of Python's own", "even", answering("{'value': ['named', ['builtins', 'True']]}", even=1)),
    Hack(
        "a message of four gigabytes",
        "square",
        PIPE
        + r"""
load(square=1)
take()
os.write(W, b'\xff' * 4)
while True: os.write(W, b'x' * 4096)
""",
    ),
    Hack(
        "a message that never ends",
        "square",
        PIPE
        + """
import time
load(square=1)
take()
os.write(W, struct.pack('<I', 1 << 20))
while True:
    os.write(W, b' ')
    time.sleep(0.01)
""",
    ),
    Hack(
        "a message that is no text",
        "square",
        PIPE
        + r"""
load(square=1)
take()
give(raw=b'\xff\xfe')
""",
    ),
    Hack(
        "a number of a million digits",
        "square",
        PIPE
        + """
load(square=1)
asked = take()
give(raw=b'{"id": "' + asked['id'].encode() + b'", "value": ' + b'9' * 10**6 + b'}')
""",
    ),
    Hack(
        "lists in lists in lists",
        "square",
        PIPE
        + """
load(square=1)
asked = take()
give(raw=b'{"id": "' + asked['id'].encode() + b'", "value": ' + b'["list", [' * 10**5 + b']]' * 10**5 + b'}')
""",
    ),
    Hack("an element that is there twice", "odd", answering("{'value': ['set', [1, 1, 3, 5]]}", odd=1)),
    Hack(
        "a key that equals no key",
        "odd",
        answering("{'value': ['dict', [[['float', 'nan'], 1], [['float', 'nan'], 2]]]}", odd=1),
    ),
    Hack("a fraction over nothing", "square", answering("{'value': ['fraction', ['0x1', '0x0']]}", square=1)),
    Hack("a decimal that cannot be compared", "square", answering("{'value': ['decimal', 'sNaN']}", square=1)),
    Hack("a range over everything", "odd", answering("{'value': ['range', ['0x0', '0x' + 'f' * 20, '0x1']]}", odd=1)),
    Hack(
        "an iterator that never ends",
        "odd",
        answering(
            "{'value': ['iterator', 2]} if asked['op'] == 'call' else {'value': ['list', [3] * asked['count']]}", odd=1
        ),
    ),
    Hack(
        "more items than were asked for",
        "odd",
        answering("{'value': ['iterator', 2]} if asked['op'] == 'call' else {'value': ['list', [1, 3, 5]]}", odd=1),
    ),
    Hack(
        "raises what it names freely",
        "square",
        answering(
            "{'raised': {'types': ['SystemExit', '__import__', 'Exception'], 'classes': [0, -1], 'text': '', 'number': 0}}",
            square=1,
        ),
    ),
    Hack("raises what is no exception", "square", answering("{'raised': 'AssertionError'}", square=1)),
    Hack(
        "changes arguments that may not change",
        "ordered",
        answering("{'value': ['list', []], 'args': ['tuple', [[asked['args'][1][0][0], []]]]}", ordered=1),
        MUTATION,
    ),
    Hack(
        "says hello again",
        "square",
        PIPE
        + """
load(square=1)
while True:
    take()
    give({'hello': True})
""",
    ),
    # --- streams ---
    Hack("prints the first answer", "sums", "print(3)"),
    Hack(
        "prints every answer",
        "sums",
        """
print(3)
print(7)
print(0)
""",
        CONTAINED,
    ),
    Hack("prints digits without end", "sums", "for n in range(10**9): print(n)"),
    Hack(
        "crashes behind the answer",
        "sums",
        """
import os
print(sum(map(int, input().split())), flush=True)
os.kill(os.getpid(), 9)
""",
        STATUS,
    ),
    Hack(
        "parts lines by what is no line end",
        "lines",
        r"""
print('\x1c'.join(map(str, range(int(input())))))
""",
        SEPARATORS,
    ),
    Hack(
        "overwrites its line",
        "sums",
        r"""
print('0\r3\r7')
""",
    ),
    Hack(
        "exits before it answers",
        "sums",
        """
import os
os._exit(0)
""",
    ),
    Hack(
        "answers on the other stream",
        "sums",
        """
import sys
print(sum(map(int, input().split())), file=sys.stderr)
""",
    ),
]

# --- objects that lie, by the operator that the tests use --------------------------------------------------------------------

# operator: (test, honest program, what the object does instead)
LIES = {
    "rounding": ("round(f(1), 2) == 0.33", "f = lambda n: n / 3", "__round__ = lambda *_: Yes()"),
    "the absolute value": ("abs(f(2)) == 2", "f = lambda n: -n", "__abs__ = lambda s: Yes()"),
    "an item": ("f('ab')['a'] == 1", "f = lambda t: {c: t.count(c) for c in t}", "__getitem__ = lambda *_: Yes()"),
    "a call": ("f(2)(3) == 5", "f = lambda n: lambda m: n + m", "__call__ = lambda *_: Yes()"),
    "what it is as text": (
        "str(f(3)) == '<3>'",
        "class f:\n def __init__(s, n): s.n = n\n __str__ = lambda s: f'<{s.n}>'",
        "__str__ = lambda s: Text()",
    ),
    "its representation": (
        "repr(f(3)) == '3!'",
        "class f:\n def __init__(s, n): s.n = n\n __repr__ = lambda s: f'{s.n}!'",
        "__repr__ = lambda s: Text()",
    ),
    "a format": ("format(f(3), '>3') == '  9'", "f = lambda n: n * n", "__format__ = lambda *_: Text()"),
    "an attribute": (
        "f(3).value == 9",
        "class f:\n def __init__(s, n): s.value = n * n",
        "__getattr__ = lambda *_: Yes()",
    ),
    "a difference": ("f(3) - 9 == 0", "f = lambda n: n * n", "__sub__ = lambda *_: 0"),
    "a difference from a number": ("9 - f(3) == 0", "f = lambda n: n * n", "__rsub__ = lambda *_: 0"),
    "a sum": ("sum([1, f(3)]) == 10", "f = lambda n: n * n", "__radd__ = lambda *_: Yes()"),
    "a product": ("f(3) * 2 == 18", "f = lambda n: n * n", "__mul__ = lambda *_: Yes()"),
    "a quotient": ("f(3) / 3 == 3", "f = lambda n: n * n", "__truediv__ = lambda *_: Yes()"),
    "a whole quotient": ("f(3) // 2 == 4", "f = lambda n: n * n", "__floordiv__ = lambda *_: Yes()"),
    "a remainder": ("f(3) % 5 == 4", "f = lambda n: n * n", "__mod__ = lambda *_: Yes()"),
    "quotient and remainder": ("divmod(f(3), 2) == (4, 1)", "f = lambda n: n * n", "__divmod__ = lambda *_: Yes()"),
    "a power": ("f(3) ** 2 == 81", "f = lambda n: n * n", "__pow__ = lambda *_: Yes()"),
    "a sign": ("-f(3) == -9", "f = lambda n: n * n", "__neg__ = lambda s: Yes()"),
    "bits": ("f(3) & 8 == 8", "f = lambda n: n * n", "__and__ = lambda *_: Yes()"),
    "an order": ("8 < f(3) < 10", "f = lambda n: n * n", "__gt__ = __lt__ = lambda *_: True"),
    "being unequal": ("not f(3) != 9", "f = lambda n: n * n", "__ne__ = lambda *_: False"),
    "a place in a list": ("f(3) in [7, 9]", "f = lambda n: n * n", "pass"),
    "an element of a set": ("{9: 1}[f(3)] == 1", "f = lambda n: n * n", "__hash__ = lambda s: 9"),
    "the next": ("next(f(3)) == 9", "f = lambda n: iter([n * n])", "__next__ = lambda s: Yes()"),
    "being of a type": ("isinstance(f(3), int) and f(3) == 9", "f = lambda n: n * n", "__class__ = int"),
    "a copy": ("copy.copy(f(3)) == 9", "import copy\nf = lambda n: n * n", "__copy__ = lambda s: Yes()"),
    "being rounded down": ("math.floor(f(3)) == 1", "import math\nf = lambda n: n / 2", "__floor__ = lambda s: Yes()"),
    "an identity after a walk": ("[*f(3)][0] == 9", "f = lambda n: [n * n]", "__iter__ = lambda s: iter([Yes()])"),
    "a walk backwards": (
        "[*reversed(f(3))][0] == 9",
        "f = lambda n: [0, n * n]",
        "__reversed__ = lambda s: iter([Yes()])",
    ),
}
DECLARED = {"what it is as text": ["__str__"], "its representation": ["__repr__"]}  # honest programs have these, too
LIAR = """
class Yes:
    __eq__ = lambda *_: True
    __hash__ = lambda s: 1
class Text(str):
    __eq__ = lambda *_: True
    __hash__ = str.__hash__
class Liar(Yes):
    {lie}
f = lambda *_: Liar()
"""
SWALLOWS = """
class Open:
    __enter__ = lambda s: 0
    __exit__ = lambda *_: True
f = lambda n: Open()
"""
WITH = "with f(3) as found:\n    assert found == 9"
OPENED = """
import contextlib
f = contextlib.contextmanager(lambda n: (yield n * n))
"""
TASKS |= {
    f"lie {number}": Task(
        "statements", {"tests": [f"assert {test}"] * 2, "methods": DECLARED.get(operator, [])}, honest
    )
    for number, (operator, (test, honest, _)) in enumerate(LIES.items())
}
HACKS += [
    Hack(f"lies about {operator}", f"lie {number}", LIAR.format(lie=lie), ONE_PROCESS)
    for number, (operator, (_, _, lie)) in enumerate(LIES.items())
]
TASKS["opened"] = Task("statements", {"tests": [WITH] * 2, "methods": ["__enter__", "__exit__"]}, OPENED)
HACKS.append(Hack("swallows the tests' assertion", "opened", SWALLOWS, ONE_PROCESS))

# --- what shares a process with the tests -----------------------------------------------------------------------------------

OF_THE_HARNESS = """
import sys
def found(name):
    frame = sys._getframe()
    while frame:
        if name in frame.f_globals:
            return frame.f_globals
        frame = frame.f_back
square = lambda x: 0
"""
IN_THE_HARNESS = {
    "has all code run as nothing": "import builtins\nreal = builtins.exec\nbuiltins.exec = lambda *a: None",
    "has all code compiled to nothing": "import builtins\nreal = builtins.compile\n"
    "builtins.compile = lambda text, *a, **k: real('pass', *a, **k)",
    "replaces how cases are run": "found('_attempt')['_attempt'] = lambda *a: None",
    "replaces how a case is judged": "found('Report')['Report'].judge = lambda s, *a: s.tell('case', 'passed')",
    "replaces what is told": "kind = found('Report')['Report']\nreal = kind.tell\n"
    "kind.tell = lambda s, what, *a: real(s, what, 'passed')",
    "has other words written": "import json\nreal = json.dumps\n"
    "json.dumps = lambda told: real({**told, 'outcome': 'passed'} if told.get('kind') == 'case' else told)",
    "writes other bytes": "import os\nreal = os.write\n"
    "os.write = lambda where, said: real(where, said.replace(b'\"failed\"', b'\"passed\"'))",
    "has errors forgotten": "import contextlib\nfound('Session')['Session'].limited = "
    "lambda s, seconds: contextlib.suppress(BaseException)",
    "replaces what is passed on": "found('partial')['partial'] = lambda *a: lambda: None",
}
HACKS += [
    Hack(cause, "square", f"{OF_THE_HARNESS}{program}\n", ONE_PROCESS) for cause, program in IN_THE_HARNESS.items()
]
SLUG = "class Unsluggable(ValueError): pass\nslug = lambda text: ''\nimport sys\n_modules = sys.modules\n"
HACKS += [
    Hack(f"pytest: {cause}", "slug", f"{SLUG}{BEGIN}{program}\n", ONE_PROCESS_PYTEST)
    for cause, program in PYTEST_HACKS.items()
]

# --- in other ways, and of outsiders -----------------------------------------------------------------------------------------

TASKS |= {name: Task(*task) for name, task in OUTSIDER_TASKS.items()}
HACKS += [Hack(*hack) for hack in [*MORE_HACKS, *OUTSIDERS, *PROCESS_HACKS]]
HACKS += [Hack(cause, task, PIPE + program) for cause, (task, program) in OUTSIDERS_AT_THE_LINK.items()]
for _hole, _hacks in (
    (ONE_PROCESS, OUTSIDERS_IN_ONE_PROCESS),
    (ONE_PROCESS_PYTEST, OUTSIDERS_IN_PYTESTS_PROCESS),
    (CONFIGURED, OUTSIDERS_CONFIGURING),
    (STOPS, OUTSIDERS_ENDING_LOOPS),
):
    HACKS += [Hack(cause, task, program, _hole) for cause, (task, program) in _hacks.items()]
