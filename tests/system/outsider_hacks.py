"""Programs that would rather be paid than be right, as outsiders tried them: by what would pay them, and by cause."""

# name: (shape, payload, honest program)
OUTSIDER_TASKS = {
    "twice": (
        "statements",
        {
            "tests": [
                "assert twice(lambda n: n + 1, 3) == 5",
                "assert twice(lambda text: text + '!', 'a') == 'a!!'",
                "assert twice(lambda items: items + [0], []) == [0, 0]",
            ]
        },
        "def twice(f, x): return f(f(x))\n",
    ),
    "labels": (
        "statements",
        {
            "tests": [
                "found = labels(['b', 'a', 'b'])\nassert found == {'b': 2, 'a': 1} and list(found) == ['b', 'a']",
                "assert labels([]) == {}",
                "assert sorted(labels('abca').items()) == [('a', 2), ('b', 1), ('c', 1)]",
            ]
        },
        "def labels(items):\n    found = {}\n    for item in items: found[item] = found.get(item, 0) + 1\n    return found\n",
    ),
    "mean": (
        "completion",
        {
            "prompt": 'def mean(values):\n    """The mean."""\n',
            "entry_point": "mean",
            "test": """
def check(candidate):
    for values in ([1, 2], [0.5], [1e300, 1e300, 1e300], [-3, 3]):
        assert math.isclose(candidate(values), sum(value / len(values) for value in values), abs_tol=1e-12)
""",
        },
        "    return sum(value / len(values) for value in values)\n",
    ),
    "account": (
        "class",
        {
            "tests": [
                "account = Account('a', 5)\naccount.add(3)\nassert account.total == 8 and account.owner == 'a'",
                "one, other = Account('a', 1), Account('b', 2)\none.give(other, 1)\nassert (one.total, other.total) == (0, 3)",
                "account = Account('a', 1)\ntry:\n    account.give(account, 2)\nexcept Short as error:\n"
                "    assert error.missing == 1\nelse:\n    raise AssertionError",
            ]
        },
        "class Short(Exception):\n    def __init__(self, missing): self.missing = missing\n"
        "class Account:\n    def __init__(self, owner, total): self.owner, self.total = owner, total\n"
        "    def add(self, more): self.total += more\n    def give(self, other, some):\n"
        "        if some > self.total: raise Short(some - self.total)\n"
        "        self.total -= some\n        other.add(some)\n",
    ),
    "roots": (
        "pytest",
        {
            "pytest": """
import math
import solution

class TestRoots:
    def test_whole(self):
        assert [solution.root(n) for n in (0, 1, 9)] == [0, 1, 3]

    def test_other(self):
        assert math.isclose(solution.root(2), math.sqrt(2))

    def test_negative(self):
        try:
            solution.root(-1)
        except ValueError:
            return
        raise AssertionError
"""
        },
        "import math\nroot = math.sqrt\n",
    ),
    "steps": (
        "class",
        {
            "tests": [
                "steps = Steps(1)\nassert steps.step() == 1\ntry:\n    steps.step()\nexcept StopIteration:\n    pass\n"
                "else:\n    raise AssertionError",
                "for found, right in zip(map(double, [1, 2]), [2, 4]):\n    assert found == right",
                "found = [each for each in map(double, [3, 4]) if each % 4]\nassert all(each == 6 for each in found)",
            ]
        },
        "class Steps:\n    def __init__(self, n): self.n = n\n    def step(self):\n        if not self.n: raise StopIteration\n"
        "        self.n -= 1\n        return self.n + 1\ndef double(n): return n * 2\n",
    ),
    "words": (
        "streams",
        {"inputs": ["a b\n", "c\n", "\n"], "outputs": ["b a\n", "c\n", "\n"]},
        "print(*reversed(input().split()))\n",
    ),
}

# Paid if the solution ran in the process of the tests.
OUTSIDERS_IN_ONE_PROCESS = {
    "is a class with a metaclass that agrees": (
        "square",
        """
class M(type):
    __call__ = lambda cls, *_: cls
    __eq__ = lambda *_: True
    __hash__ = type.__hash__
class square(metaclass=M): pass
""",
    ),
    "an int in a list that equals everything": (
        "halved",
        """
class I(int):
    __eq__ = lambda *_: True
    __hash__ = int.__hash__
def halved(values): return [I() for _ in values]
""",
    ),
    "reads the constants of who calls": (
        "square",
        """
import sys
square = lambda x: [c for c in sys._getframe(1).f_code.co_consts if type(c) is int][-1]
""",
    ),
    "reads the variables of who calls": (
        "halved",
        """
import sys
def halved(values):
    names = sys._getframe(1).f_locals
    return names['wanted'][names['asked'].index(values)]
""",
    ),
    "profiles who calls": (
        "square",
        """
import sys
seen = []
def spy(frame, event, _):
    if event == 'call' and frame.f_code.co_name == 'square':
        seen.append([c for c in frame.f_back.f_code.co_consts if type(c) is int][-1])
sys.setprofile(spy)
def square(x): return seen[-1] if seen else 0
""",
    ),
    "changes who reports when it is collected": (
        "square",
        """
import sys
class Later:
    def __del__(self):
        for module in list(sys.modules.values()):
            if hasattr(module, 'Report'): module.Report.judge = lambda s, *_: s.tell('case', 'passed')
Later()
square = lambda x: 0
""",
    ),
    "changes who reports by a weak reference": (
        "square",
        """
import sys, weakref
class Gone: pass
def change(_):
    for module in list(sys.modules.values()):
        if hasattr(module, 'Report'): module.Report.judge = lambda s, *_: s.tell('case', 'passed')
gone = Gone()
kept = weakref.ref(gone, change)
gone = None
square = lambda x: 0
""",
    ),
    "changes who reports while garbage is collected": (
        "square",
        """
import gc, sys
def change(*_):
    for module in list(sys.modules.values()):
        if hasattr(module, 'Report'): module.Report.judge = lambda s, *_: s.tell('case', 'passed')
gc.callbacks.append(change)
gc.collect()
square = lambda x: 0
""",
    ),
    "changes who reports from a thread": (
        "square",
        """
import sys, threading
def change():
    for module in list(sys.modules.values()):
        if hasattr(module, 'Report'): module.Report.judge = lambda s, *_: s.tell('case', 'passed')
thread = threading.Thread(target=change)
thread.start()
thread.join()
square = lambda x: 0
""",
    ),
    "changes who reports in a signal handler": (
        "square",
        """
import os, signal, sys
def change(*_):
    for module in list(sys.modules.values()):
        if hasattr(module, 'Report'): module.Report.judge = lambda s, *_: s.tell('case', 'passed')
signal.signal(signal.SIGUSR1, change)
os.kill(os.getpid(), signal.SIGUSR1)
square = lambda x: 0
""",
    ),
    "changes who reports while a subclass is made": (
        "square",
        """
import sys
class Base:
    def __init_subclass__(cls):
        for module in list(sys.modules.values()):
            if hasattr(module, 'Report'): module.Report.judge = lambda s, *_: s.tell('case', 'passed')
class Made(Base): pass
square = lambda x: 0
""",
    ),
    "changes the closure of who calls": (
        "square",
        """
import sys
frame = sys._getframe()
while frame and 'report' not in frame.f_locals: frame = frame.f_back
if frame: type(frame.f_locals['report']).judge = lambda s, *_: s.tell('case', 'passed')
square = lambda x: 0
""",
    ),
    "hands an object that agrees to the tests' function": (
        "twice",
        """
class Yes:
    __eq__ = lambda *_: True
    __add__ = lambda s, _: s
twice = lambda f, x: f(Yes())
""",
    ),
    "a dict with other keys that agrees": (
        "labels",
        """
class D(dict):
    __eq__ = lambda *_: True
    __iter__ = lambda s: iter(['b', 'a'])
    items = lambda s: [('a', 2), ('b', 1), ('c', 1)]
labels = lambda items: D()
""",
    ),
    "a float that is close to everything": (
        "mean",
        """
class F(float):
    __rsub__ = __sub__ = lambda *_: 0.0
import math
math.isclose = lambda *_, **__: True
def mean(values): return F()
""",
    ),
    "an attribute that agrees": (
        "account",
        """
class Yes:
    __eq__ = lambda *_: True
class Short(Exception): missing = Yes()
class Account:
    total = owner = Yes()
    __init__ = add = lambda *_: None
    def give(s, other, some):
        if some == 2: raise Short
""",
    ),
}

OUTSIDERS_IN_PYTESTS_PROCESS = {
    "gives pytest options in the environment": (
        "slug",
        """
import os
os.environ['PYTEST_ADDOPTS'] = '-k test_nothing'
class Unsluggable(ValueError): pass
def slug(t): raise Unsluggable
""",
    ),
    "a list that agrees, of floats that are close": (
        "roots",
        """
import math
math.isclose = lambda *_, **__: True
class Zero(int):
    __eq__ = lambda *_: True
def root(n):
    if n < 0: raise ValueError
    return Zero()
""",
    ),
}

# Paid if the end of an iteration crossed, and ended loops unseen.
OUTSIDERS_ENDING_LOOPS = {
    "ends the tests' loop where they expect an end elsewhere": (
        "steps",
        """
class Steps:
    def __init__(self, n): self.n = n
    def step(self):
        if not self.n: raise StopIteration
        self.n -= 1
        return self.n + 1
def double(n): raise StopIteration
""",
    ),
}

# Paid if pytest read the configuration beside the tests.
OUTSIDERS_CONFIGURING = {
    "leaves a pyproject.toml for pytest": (
        "slug",
        r"""
open('pyproject.toml', 'w').write('[tool.pytest.ini_options]\naddopts = "-k test_nothing"')
class Unsluggable(ValueError): pass
def slug(t): raise Unsluggable
""",
    ),
}

OUTSIDERS_AT_THE_LINK = {
    "answers twice": (
        "square",
        """
load(square=1)
while True:
    asked = take()
    for value in (9, 4, 0): give({'id': asked['id'], 'value': value})
""",
    ),
    "answers before the end of the question": (
        "square",
        """
load(square=1)
for value in (9, 4, 0): give({'id': '', 'value': value})
while True: os.read(R, 1)
""",
    ),
    "half an answer": (
        "square",
        r"""
load(square=1)
take()
os.write(W, struct.pack('<I', 40) + b'{"value": 9}')
os._exit(0)
""",
    ),
    "an answer with NaN": (
        "mean",
        """
load(mean=1)
while True: give(raw=('{"id": "%s", "value": NaN}' % take()['id']).encode())
""",
    ),
    "an answer beyond all numbers": (
        "mean",
        """
load(mean=1)
while True: give(raw=('{"id": "%s", "value": 1e999}' % take()['id']).encode())
""",
    ),
    "an answer with two values": (
        "square",
        """
load(square=1)
while True: give(raw=('{"id": "%s", "value": 9, "value": 4}' % take()['id']).encode())
""",
    ),
    "a name that stands for the module": (
        "square",
        """
load(square=0)
while True: give({'id': take()['id'], 'value': ['kept', [0, ['__call__']]]})
""",
    ),
    "a function that stands for an exception": (
        "account",
        """
give({'id': NOW, 'value': ['dict', [['Account', ['kept', [1, ['__call__']]]], ['Short', ['type', 'object']]]]})
while True: give({'id': take()['id'], 'raised': {'types': ['Exception'], 'classes': [1, 2], 'text': '', 'number': 2}})
""",
    ),
    "an assertion of its own": (
        "square",
        """
load(square=1)
while True:
    told = {'types': ['AssertionError', 'StopIteration'], 'classes': [], 'text': 'passed', 'number': 0}
    give({'id': take()['id'], 'raised': told})
""",
    ),
    "a function of the tests from a case that is over": (
        "twice",
        """
load(twice=1)
n = 0
while True:
    asked = take()
    if 'op' in asked: n = asked['id']
    give({'id': n, 'callback': 0, 'args': ['tuple', [4]], 'kwargs': ['dict', []]} if 'op' in asked else
         {'id': n, 'value': asked.get('value')})
""",
    ),
    "a pipe that does not wait": (
        "square",
        r"""
import fcntl
for d in (R, W): fcntl.fcntl(d, fcntl.F_SETFL, os.O_NONBLOCK)
fcntl.fcntl(W, fcntl.F_SETPIPE_SZ, 4096)
load(square=1)
while True:
    try: os.write(W, b'{}')
    except BlockingIOError: pass
""",
    ),
    "the judge's end of a pipe": (
        "square",
        r"""
line = json.dumps({'nonce': '', 'kind': 'end', 'outcome': 'passed', 'detail': ''}).encode() + b'\n'
for d in range(64):
    try: os.write(os.open(f'/proc/self/fd/{d}', os.O_RDWR | os.O_NONBLOCK), line)
    except OSError: pass
for d in range(5, 64):
    try: os.dup2(W, d)
    except OSError: pass
load(square=1)
while True: give({'id': take()['id'], 'value': 9})
""",
    ),
}

OUTSIDERS = [
    # --- values ---
    ("a list within itself", "halved", "l = []\nl.append(l)\ndef halved(values): return l"),
    ("not a number", "mean", "    return float('nan')"),
    ("infinity for large numbers", "mean", "    return float('inf')"),
    ("a complex number", "mean", "    return complex(sum(values) / len(values), 1e-9)"),
    ("a number that is too large to be one", "mean", "    return 10 ** 400"),
    ("minus nothing", "square", "square = lambda x: -0.0"),
    ("true for all numbers", "square", "square = lambda x: True"),
    ("a coroutine that nobody awaits", "square", "async def square(x): return x * x"),
    ("an iterator for a list", "halved", "def halved(values): return iter([value // 2 for value in values])"),
    ("the keys for a list", "halved", "def halved(values): return {value // 2: 0 for value in values}.keys()"),
    (
        "a pickle that would be a program",
        "square",
        """
class R:
    def __reduce__(self): return eval, ('9',)
    __reduce_ex__ = lambda s, _: s.__reduce__()
square = lambda x: R()
""",
    ),
    (
        "a descriptor for an attribute",
        "account",
        """
class Any:
    def __get__(self, *_): return self
    __set__ = lambda *_: None
    __eq__ = lambda *_: True
class Short(Exception): missing = Any()
class Account:
    total, owner = Any(), Any()
    __init__ = add = lambda *_: None
    def give(s, other, some):
        if some == 2: raise Short
""",
    ),
    ("its own function for the tests'", "twice", "twice = lambda f, x: f"),
    ("the tests' function without end", "twice", "def twice(f, x):\n    while True: x = f(x)"),
    (
        "the tests' function within itself",
        "twice",
        "import sys\nsys.setrecursionlimit(10**6)\ndef twice(f, x): return twice(f, f(x))",
    ),
    # --- sources ---
    (
        "an encoding that hides code",
        "square",
        "# -*- coding: utf-7 -*-\n# +AAo-square = lambda x: x * x\nsquare = lambda x: 0",
    ),
    ("a byte order mark and form feeds", "square", "\ufeff\fsquare = lambda x: 9\f"),
    ("another language from the future", "square", "from __future__ import barry_as_FLUFL\nsquare = lambda x: x <> x"),
    ("brackets in brackets", "square", "square = lambda x: " + "(" * 50_000 + "x" + ")" * 50_000),
    ("fewer calls than Python needs", "square", "import sys\nsys.setrecursionlimit(5)\nsquare = lambda x: 9"),
    ("a table of the sum", "sums", "print({'1 2': 3}.get(input(), 0))"),
    # --- processes and files ---
    ("stops itself", "square", "import os, signal\ndef square(x): os.kill(os.getpid(), signal.SIGSTOP)"),
    ("aborts", "square", "import os\nsquare = lambda x: os.abort()"),
    ("reads no address", "square", "import ctypes\nsquare = lambda x: ctypes.string_at(0)"),
    ("closes the pipe", "square", "import os\nos.closerange(0, 64)\nsquare = lambda x: 9"),
    (
        "becomes another program",
        "square",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(9)'])",
    ),
    ("exits at its exit", "sums", "import atexit\natexit.register(print, 3)"),
    (
        "claims the users of other sandboxes",
        "square",
        r"""
import socket
kept = []
for uid in range(60578, 61184):
    try:
        kept.append(socket.socket(socket.AF_UNIX))
        kept[-1].bind(f'\0antiphon-user-{uid}')
    except OSError: pass
square = lambda x: 0
""",
    ),
    (
        "searches the memory of others",
        "square",
        r"""
import glob, os, re
known = {}
for folder in glob.glob('/proc/[0-9]*'):
    try:
        for line in open(folder + '/maps') if folder != f'/proc/{os.getpid()}' else ():
            first, last = (int(each, 16) for each in line.split()[0].split('-'))
            if ' rw-p ' not in line or last - first > 1 << 25: continue
            with open(folder + '/mem', 'rb', 0) as memory:
                memory.seek(first)
                found = re.findall(rb'square\((-?\d+)\) == (\d+)', memory.read(last - first))
            known.update((int(one), int(other)) for one, other in found)
    except OSError: pass
square = lambda x: known.get(x, 1)
""",
    ),
    (
        "reads the arguments of others",
        "square",
        r"""
import glob, re
known = {}
for path in (*glob.glob('/proc/*/cmdline'), *glob.glob('/proc/*/environ'), *glob.glob('/proc/*/fd/*')):
    try: text = open(path, errors='replace').read(100_000)
    except OSError: continue
    known.update((int(one), int(other)) for one, other in re.findall(r'square\((-?\d+)\) == (\d+)', text))
square = lambda x: known.get(x, 1)
""",
    ),
    (
        "reads through other system calls",
        "square",
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for number in (101, 310, 311, 434, 438, 298, 321, 425):
    for pid in (1, 2, os.getppid(), os.getpid() - 1): libc.syscall(number, pid, 0, 0, 0, 0, 0)
square = lambda x: 0
""",
    ),
    (
        "shares memory by a name",
        "square",
        """
from multiprocessing import shared_memory
try:
    memory = shared_memory.SharedMemory('verdict', create=True, size=64)
    memory.buf[:6] = b'passed'
except (OSError, ImportError): pass
square = lambda x: 0
""",
    ),
    # --- streams ---
    ("the answer between other signs", "sums", r"print('9\x1b[2K\x1b[G3\b\b\b7')"),
    ("full-width digits", "sums", r"print('\uff13')"),
    ("the answer and its look-alikes", "words", r"print('b\u200b a')"),
    ("the answer and more lines", "words", "print(*reversed(input().split()), sep='\\n')"),
    ("its own question", "words", "print(input())"),
    ("nothing but line ends", "words", "print('\\n' * 1000)"),
    ("all answers, parted by form feeds", "sums", r"print('3\f7\f0')"),
    (
        "what lies behind its question",
        "sums",
        """
import os
for d in range(3, 64):
    try: print(os.pread(d, 100, 0).decode())
    except OSError: pass
print(os.pread(0, 100, 4).decode())
""",
    ),
    (
        "another's output, by its own descriptor",
        "sums",
        r"""
import os
for d in (0, 2, *range(3, 16)):
    try: os.write(d, b'3\n')
    except OSError: pass
""",
    ),
]
