"""Small mistakes made on purpose in `antiphon/algorithms/`, one at a time: how many do the tests notice?

python benchmarks/mutation.py --mutants 500

A mutant is one change: an operator, a constant, a condition, two arguments, a statement left out. Docstrings, names, types and
decorators stay as they are; mutants that mean the same as the original count like all others. Each is imported and tested
in a fork of a process that has everything else in memory, in a copy of the checkout; the tests are run as they are, except
that hypothesis does not look for the shortest example of a failure.
"""

import argparse
import ast
import copy
import difflib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from _common import ROOT, table, write_result

SOURCES = "antiphon/algorithms"
TESTS = [
    "tests/unit/algorithms",
    "tests/unit/test_testing.py",
    "tests/unit/learning/test_stages.py",
    "tests/unit/learning/test_batch.py",
    "tests/unit/learning/test_gradient.py",
]
COPIED = ("antiphon", "tests", "docs", "recipes", "pyproject.toml")
MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3")]
WARM = ["hypothesis.strategies", "numpy", "pydantic", "pytest", "torch", "torch.overrides", "transformers", *MODELS]
LOG = "tests.log"

OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "sum": "mean", "mean": "sum"}

Change = tuple[ast.AST, str]  # what is replaced, and with which text

SURVIVED, NO_IMPORT, NO_TESTS = "survived", 101, 102
ENDS = {0: SURVIVED, 1: "a test failed", 2: "tests could not be collected", NO_IMPORT: "it could not be imported"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    path: str  # from the root of the checkout
    line: int
    source: str  # of the whole file, changed


# --- mistakes ------------------------------------------------------------------------------------------------------------


def mutants_of(path: str) -> list[Mutant]:
    """All mutants of one file, each once."""
    source = (ROOT / path).read_text(encoding="utf-8")
    found = {
        changed: Mutant(path, node.lineno, changed)
        for node, text in changes(ast.parse(source))
        if (changed := spliced(source, node, text)) != source
    }
    return list(found.values())


def changes(tree: ast.AST) -> Iterator[Change]:
    """The changes of all nodes below `tree`."""
    for node in _walk(tree):
        yield from _operators(node)
        yield from _constants(node)
        yield from _conditions(node)
        yield from _calls(node)
        yield from _statements(node)


def spliced(source: str, node: ast.AST, text: str) -> str:
    """The source with `text` in the place of `node`."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]  # columns are counted in bytes
    first, last = node.lineno - 1, node.end_lineno - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    return b"".join([*lines[:first], before, text.encode(), after, *lines[last + 1 :]]).decode()


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is in it, but for types, decorators and texts."""
    yield node
    if isinstance(node, ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _with(node: ast.AST, **fields: object) -> str:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return f"({ast.unparse(changed)})"


def _operators(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BinOp | ast.BoolOp):
        for other in OPERATORS.get(type(node.op), ()):
            yield node, _with(node, op=other())
    elif isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            for other in OPERATORS[type(operator)]:
                yield node, _with(node, ops=[*node.ops[:place], other(), *node.ops[place + 1 :]])
    elif isinstance(node, ast.UnaryOp):
        yield node, f"({ast.unparse(node.operand)})"


def _constants(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield node, repr(not node.value)
    elif isinstance(node.value, int | float):
        yield node, repr(node.value + 1)
        if node.value:
            yield node, repr(type(node.value)())


def _conditions(node: ast.AST) -> Iterator[Change]:
    tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else getattr(node, "ifs", [])
    for test in tests:
        yield test, f"(not ({ast.unparse(test)}))"


def _calls(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and node.func.id in NAMES:
        yield node.func, NAMES[node.func.id]
    if isinstance(node.func, ast.Attribute) and node.func.attr in NAMES:
        yield node.func, _with(node.func, attr=NAMES[node.func.attr])
    match node.args:
        case [first, second, *rest] if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            yield node, _with(node, args=[second, first, *rest])


def _statements(node: ast.AST) -> Iterator[Change]:
    """Statements of a function that can be left out: those without which every name is still there."""
    if not isinstance(node, ast.FunctionDef):
        return
    known = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
    for inner in ast.walk(node):
        for statement in getattr(inner, "body", []) if isinstance(inner, ast.FunctionDef | ast.If | ast.For) else []:
            names = {
                each.id
                for each in ast.walk(statement)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
            said = isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant)
            changed = isinstance(statement, ast.Assign | ast.AugAssign) and names <= known
            ended = isinstance(statement, ast.Return) and isinstance(inner, ast.If)
            if said or changed or ended or isinstance(statement, ast.Raise):
                yield statement, "pass"
            known |= names


# --- trials --------------------------------------------------------------------------------------------------------------


class NoShrinking:
    """A plugin of pytest: that a property fails is enough."""

    def pytest_configure(self) -> None:
        """Called when the suite's own profile is there."""
        from hypothesis import Phase, settings

        settings.register_profile("mutation", settings.get_profile("antiphon"), phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutation")


def settle(scratch: str) -> None:
    """Begin a worker: in a copy of the checkout that is its own, with all but the package imported."""
    home = Path(tempfile.mkdtemp(dir=scratch))
    for name in COPIED:
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copied(ROOT / name, home / name)
    os.chdir(home)
    sys.path.insert(0, str(home))
    for name in WARM:
        importlib.import_module(name)
    assert "antiphon" not in sys.modules


def tried(mutant: Mutant, patience: int) -> str:
    """How the tests end on this mutant, in the copy that is the working directory. Slower than `patience` seconds is an end."""
    path = Path(mutant.path)
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.source, encoding="utf-8")
    try:
        child = os.fork()
        if not child:
            _end_with(mutant.path, patience)
        _, status = os.waitpid(child, 0)
    finally:
        path.write_text(original, encoding="utf-8")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return "it took too long"
    code = os.waitstatus_to_exitcode(status)
    if code not in ENDS:
        raise RuntimeError(f"{mutant.path}:{mutant.line}: the tests ended with {code}:\n{Path(LOG).read_text()}")
    return ENDS[code]


def _end_with(path: str, patience: int) -> None:
    """End this process, which is a fork, with what the tests come to; it must never go on as its parent would."""
    code = NO_TESTS
    try:
        signal.alarm(patience)
        log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = _test(path)
    except BaseException:  # noqa: BLE001 - told in the log, and by the code
        traceback.print_exc()
    finally:
        os._exit(code)


def _test(path: str) -> int:
    """Import the mutant and run the tests."""
    import pytest

    try:
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    except Exception:  # noqa: BLE001 - whatever a mistake at import raises
        return NO_IMPORT
    assert Path(str(module.__file__)).is_relative_to(Path.cwd())
    # What is warm cannot be rewritten by pytest, which matters to nobody.
    calm = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*calm, *TESTS], plugins=[NoShrinking()]))


def difference(mutant: Mutant) -> str:
    """File, line and the lines before and after."""
    original = (ROOT / mutant.path).read_text(encoding="utf-8").splitlines()
    lines = list(difflib.unified_diff(original, mutant.source.splitlines(), lineterm="", n=0))[3:]
    return "\n".join([f"{mutant.path}:{mutant.line}", *(f"    {line}" for line in lines)])


def main() -> None:
    """Test the drawn mutants, print those that survive, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True  # a mutant of the same size and second would be taken for the file before it
    paths = sorted(str(path.relative_to(ROOT)) for path in (ROOT / SOURCES).glob("*.py"))
    possible = [mutant for path in paths for mutant in mutants_of(path)]
    drawn = random.Random(options.seed).sample(possible, min(options.mutants, len(possible)))
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(options.workers, get_context("fork"), initializer=settle, initargs=(scratch,)) as pool,
    ):
        whole = Mutant(paths[-1], 1, (ROOT / paths[-1]).read_text(encoding="utf-8"))
        if (end := pool.submit(tried, whole, 3600).result()) != SURVIVED:
            sys.exit(f"without a mistake: {end}")
        patience = 60 + int(5 * (time.perf_counter() - began))
        ends = []
        for mutant, end in zip(drawn, pool.map(tried, drawn, [patience] * len(drawn)), strict=True):
            ends.append(end)
            if end == SURVIVED:
                print(difference(mutant), flush=True)
    seen = Counter(ends)
    print(table(["mutants", "times"], [[end, str(count)] for end, count in sorted(seen.items())]))
    killed = len(drawn) - seen[SURVIVED]
    figures = {
        "possible": len(possible),
        "mutants": len(drawn),
        "killed": killed,
        "share": killed / len(drawn),
        "seconds": time.perf_counter() - began,
    }
    print("written:", write_result("mutation", figures, options.out))


if __name__ == "__main__":
    main()
