"""Trials of mutants: each in a fork of a process that has everything but the package in memory, in a copy of the checkout.

First all unit tests of a room are run once, on the sources as they are, to see which lines each test reaches. A mutant is then
tried on the tests that reach its statement alone, the fastest first, up to the first that fails.

A draw takes those changes whose hashes with the seed are the least: what is drawn of a file depends little on the others.
"""

import ast
import hashlib
import importlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutants.rooms import DECLARATIONS, ROOMS, ROOT

from antiphon_envs.mini_swe.mutants import Change, list_changes, make_mutant

COPIED = (
    "antiphon",
    "antiphon_envs",
    "tests",
    "docs",
    "recipes",
    "benchmarks",
    "scenarios",
    "tools",
    "Makefile",
    "README.md",
    "pyproject.toml",
)
MODELS = [
    f"transformers.models.{name}.modeling_{name}"
    for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "glm4_moe")
]
WARM = ["hypothesis.strategies", "numpy", "pydantic", "pytest", "torch", "torch.overrides", "transformers", *MODELS]
LOG = "tests.log"
LAST = "last_test"  # file in which the test that runs is named
PATIENCE = 45  # seconds that a test may take beside six times what it took without a fault
RUN = 20  # seconds that a test takes of whose time nothing is known
MOST = 300  # seconds of unit tests that one mutant is tried on

SURVIVED, NO_IMPORT, NO_TESTS = "survived", 101, 102
UNREACHED = "survived: no test reaches it"
ENDS = {
    0: SURVIVED,
    1: "a test failed",
    2: "tests could not be collected",
    NO_IMPORT: "it could not be imported",
    NO_TESTS: "pytest ended with an error",  # without a fault it did not: see `reach_of`
}
SYMMETRIC = {"array_equal", "equal", "gcd", "isclose", "max", "maximum", "min", "minimum"}  # functions of two alike
USAGE_ERROR = 4  # of pytest: among others, a conftest.py cannot be imported
TOO_LONG = "a test took too long"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    room: str
    path: str  # from the root of the checkout
    line: int
    source: str  # of the whole file, changed
    change: Change

    @property
    def key(self) -> str:
        """What tells it from all others, of these and of other sources."""
        return f"{self.path}:{hashlib.sha256(self.source.encode()).hexdigest()[:20]}"


@dataclass(frozen=True, slots=True)
class Trial:
    """How the tests ended on a mutant."""

    end: str
    test_file: str = ""  # that noticed it; empty if it survived, or could not even be imported


@dataclass(frozen=True, slots=True)
class Reach:
    """Which unit tests of a room reach which lines, and how long each takes."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> "Reach":
        """Return what a JSON file has."""
        seconds, lines = json.loads(path.read_text(encoding="utf-8"))
        return cls(seconds, {name: {int(line): tests for line, tests in each.items()} for name, each in lines.items()})

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach the mutant's statement, then those that may in another process; fastest first."""
        lines = self.lines.get(mutant.path, {})
        original = (ROOT / mutant.path).read_text(encoding="utf-8")
        near = {test for line in _statement(original, mutant.line) for test in lines.get(line, ())}
        if not near and _is_run_at_import(original, mutant.line):  # by all that use the file
            near = {test for tests in lines.values() for test in tests} or {*self.seconds}  # tables have no other lines
            near |= {test for test in self.seconds if test.partition("::")[0] in DECLARATIONS}
        tests = sorted(near, key=self.seconds.__getitem__)
        if ROOMS[mutant.room].runs_elsewhere(mutant.path):
            tests += sorted(self.seconds.keys() - near, key=self.seconds.__getitem__)
        return self._affordable(tests)

    def _affordable(self, tests: list[str]) -> list[str]:
        total, found = 0.0, []
        for test in tests:
            total += self.seconds[test]
            if total > MOST:
                break
            found.append(test)
        return found


def draw(rooms: Sequence[str], count: int, seed: int) -> tuple[list[Mutant], Counter[str]]:
    """Return so many mutants of rooms, drawn from all that are possible, and how many changes each room has."""
    possible = [(room, path, change) for room in rooms for path in ROOMS[room].files() for change in changes_in(path)]
    sources = {path: (ROOT / path).read_bytes() for _, path, _ in possible}
    possible.sort(key=lambda each: _lot(seed, sources[each[1]], each))
    found = filter(None, itertools.starmap(_mutant, possible))
    return list(itertools.islice(found, count)), Counter(room for room, _, _ in possible)


def _lot(seed: int, source: bytes, drawn: tuple[str, str, Change]) -> bytes:
    """Return a hash of the seed and a change, by the lines that it is in and not by what is before them."""
    room, path, (start, stop, text) = drawn
    begin, end = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", stop)
    lines = source[begin:end]
    told = (seed, room, path, lines, source.count(lines, 0, begin), start - begin, stop - begin, text)
    return hashlib.sha256(repr(told).encode()).digest()


def changes_in(path: str) -> list[Change]:
    """Return the changes of a file that may be faults; not of conditions that are for type checkers."""
    text = (ROOT / path).read_text(encoding="utf-8")
    source, harmless = text.encode(), _harmless_spans(text)
    return [
        (start, stop, new)
        for start, stop, new in list_changes(text)
        if not source.startswith(b"TYPE_CHECKING:", start) and (start, stop) not in harmless
    ]


def _harmless_spans(text: str) -> set[tuple[int, int]]:
    """Return the places, as bytes, whose change no test can notice: what is the same in either order, and `strict` of zip.

    `strict=True` says that lengths are equal, which is checked while the program runs, and changes nothing where they are.
    """
    lines = [0, *itertools.accumulate(len(line) for line in text.encode().splitlines(keepends=True))]

    def place(node: ast.expr, last: ast.expr) -> tuple[int, int]:
        assert last.end_lineno is not None and last.end_col_offset is not None
        return lines[node.lineno - 1] + node.col_offset, lines[last.end_lineno - 1] + last.end_col_offset

    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in SYMMETRIC and len(node.args) > 1:
                found.add(place(node.args[0], node.args[1]))
            found |= {place(each.value, each.value) for each in node.keywords if (name, each.arg) == ("zip", "strict")}
    return found


def _mutant(room: str, path: str, change: Change) -> Mutant | None:
    mutant = make_mutant((ROOT / path).read_text(encoding="utf-8"), change)
    return Mutant(room, path, mutant.line, mutant.source, change) if mutant else None


def _is_run_at_import(source: str, line: int) -> bool:
    """Return True if a line is in no function's body."""
    functions = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return not any(node.body[0].lineno <= line <= (node.end_lineno or line) for node in functions)


def _statement(source: str, line: int) -> range:
    """Return the lines of the innermost statement around a line: of a compound one its head, of a function all of it."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line):
            body = getattr(node, "body", None)
            in_head = bool(body) and line < body[0].lineno
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not body:
                found = range(node.lineno, (node.end_lineno or line) + 1)
            elif in_head:
                found = range(node.lineno, body[0].lineno)
    return found


# --- pytest --------------------------------------------------------------------------------------------------------------


class Hurried:
    """A plugin of pytest: chosen tests in a given order, each with a deadline; that a property fails is enough."""

    def __init__(self, seconds: dict[str, float] | None) -> None:
        self._seconds = seconds
        self._last = Path(LAST).resolve()

    def pytest_configure(self) -> None:
        """Called when the suite's own profile is there."""
        from hypothesis import Phase, settings

        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("mutation", settings.get_profile("antiphon"), max_examples=20, phases=phases)
        settings.load_profile("mutation")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the chosen tests; a file's together, for fixtures that they share."""
        if self._seconds is None:
            return
        order = {test: place for place, test in enumerate(self._seconds)}
        files = {test.partition("::")[0]: place for test, place in reversed(order.items())}
        items[:] = [item for item in items if item.nodeid in order]
        items.sort(key=lambda item: (files[item.nodeid.partition("::")[0]], order[item.nodeid]))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Give each test its time, and name it; the signal's default is to end the process."""
        self._last.write_text(nodeid, encoding="utf-8")
        signal.alarm(PATIENCE + int(6 * (self._seconds[nodeid] if self._seconds else RUN)))


class Watched:
    """A plugin of pytest: which lines each test reaches, and how long it takes."""

    def __init__(self, folders: list[str]) -> None:
        import coverage

        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=folders)
        self._began = 0.0
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    def pytest_sessionstart(self) -> None:
        """Begin before tests are imported."""
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._coverage.switch_context(nodeid)
        self._began = time.perf_counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test that fails without a fault tells nothing of faults."""
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended."""
        self._coverage.switch_context("")
        if nodeid not in self._failed:
            self._seconds[nodeid] = round(time.perf_counter() - self._began, 4)

    def reach(self) -> Reach:
        """Return what was seen; of tests that passed."""
        self._coverage.stop()
        data = self._coverage.get_data()
        lines = {}
        for name in data.measured_files():
            by_line = data.contexts_by_lineno(name).items()
            reached = {line: [test for test in tests if test in self._seconds] for line, tests in by_line}
            lines[str(Path(name).relative_to(Path.cwd()))] = {line: tests for line, tests in reached.items() if tests}
        return Reach(self._seconds, lines)


# --- workers -------------------------------------------------------------------------------------------------------------


def settle(scratch: str) -> None:
    """Begin a worker: in a copy of the checkout that is its own, with all but the package imported."""
    home = Path(tempfile.mkdtemp(dir=scratch))
    for name in COPIED:
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copied(ROOT / name, home / name)
    os.chdir(home)
    sys.path.insert(0, str(home))
    os.environ["PYTHONPATH"] = str(home)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("antiphon", "antiphon_envs")]:
        del sys.modules[name]  # what mutants are made with
    for name in WARM:
        importlib.import_module(name)


def reach_of(room: str, path: Path) -> Reach:
    """Run all unit tests of a room without a fault, and keep what they reach. Those that fail all the same are left out."""
    folders = [str(Path.cwd() / glob) for glob in ROOMS[room].sources]

    def work() -> int:
        watched = Watched(folders)
        code = _pytest(["--maxfail=10", *ROOMS[room].test_files()], Hurried(None), watched)
        reach = watched.reach()
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps([reach.seconds, reach.lines]), encoding="utf-8")
        draft.rename(path)
        return code

    if (end := _in_fork(work)) not in (0, 1):
        raise RuntimeError(f"{room}: without a fault the tests end with {end}:\n{Path(LOG).read_text()[-4000:]}")
    return Reach.read(path)


def tried(mutant: Mutant, reach: Reach) -> Trial:
    """Return how the tests end on this mutant, in the copy that is the working directory."""
    tests = reach.tests(mutant)
    Path(LAST).write_text("", encoding="utf-8")
    end = UNREACHED
    path = Path(mutant.path)
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.source, encoding="utf-8")
    try:
        if tests:
            seconds = {test: reach.seconds[test] for test in tests}
            end = _ended(mutant, lambda: _test(mutant.path, sorted({t.partition("::")[0] for t in tests}), seconds))
        for run in ROOMS[mutant.room].runs if end in (SURVIVED, UNREACHED) else ():
            if (end := _ended(mutant, lambda run=run: _test(mutant.path, [run], None))) != SURVIVED:
                break
    finally:
        path.write_text(original, encoding="utf-8")
    noticed = end not in (SURVIVED, UNREACHED)
    return Trial(end, Path(LAST).read_text(encoding="utf-8").partition("::")[0] if noticed else "")


def _ended(mutant: Mutant, work: Callable[[], int]) -> str:
    """Return in words how the tests of a fork end."""
    code = _in_fork(work)
    if code == -signal.SIGALRM:
        return TOO_LONG
    if code < 0:
        return f"the tests were ended by {signal.Signals(-code).name}"
    if code not in ENDS:
        said = Path(LOG).read_text()
        if code == USAGE_ERROR and "ImportError while loading conftest" in said:
            return "the tests cannot be imported"
        raise RuntimeError(f"{mutant.path}:{mutant.line}: the tests ended with {code}:\n{said[-4000:]}")
    return ENDS[code]


def _in_fork(work: Callable[[], int]) -> int:
    """Return the exit code of a fork that does this work; what it leaves running is ended too."""
    child = os.fork()
    if not child:
        _end_with(work)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def _end_with(work: Callable[[], int]) -> None:
    """End this process, which is a fork, with what the work comes to; it must never go on as its parent would."""
    code = NO_TESTS
    try:
        os.setsid()
        signal.alarm(300)  # for imports and collection
        log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = work()
    except BaseException:  # noqa: BLE001 - told in the log, and by the code
        traceback.print_exc()
    finally:
        os._exit(code)


def _test(path: str, files: Sequence[str], seconds: dict[str, float] | None) -> int:
    """Import the mutant and run tests of these files: those that are named, or all."""
    try:
        module = importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    except Exception:  # noqa: BLE001 - whatever a fault at import raises
        return NO_IMPORT
    assert Path(str(module.__file__)).is_relative_to(Path.cwd())
    return _pytest(["-x", *files], Hurried(seconds))


def _pytest(arguments: Sequence[str], *plugins: object) -> int:
    import pytest

    # What is warm cannot be rewritten by pytest, which matters to nobody.
    calm = ["-q", "-o", "timeout=0", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # `Hurried` uses the alarm
    for plugin in ("cacheprovider", "xdist", "randomly"):
        calm += ["-p", f"no:{plugin}"]
    return int(pytest.main([*calm, *arguments], plugins=list(plugins)))
