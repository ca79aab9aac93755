"""Small mistakes made on purpose in `antiphon/algorithms/`, one at a time: how many do the tests notice?

python benchmarks/mutation.py --mutants 500

A mutant has one fault of `antiphon_envs.mini_swe.mutants`; those that mean the same as the original count like all others.
Each is imported and tested in a fork of a process that has everything else in memory, in a copy of the checkout; the tests are
run as they are, except that hypothesis tries a fifth of the examples and does not look for the shortest one that fails: what
survives here may not survive the whole suite.
"""

import argparse
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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from _common import ROOT, table, write_result

from antiphon_envs.mini_swe.mutants import all_mutants

SOURCES = "antiphon/algorithms"
TESTS = [
    "tests/unit/algorithms",
    "tests/unit/algorithms/test_testing.py",
    "tests/unit/learning/test_stages.py",
    "tests/unit/learning/test_batch.py",
    "tests/unit/learning/test_gradient.py",
]
COPIED = ("antiphon", "tests", "docs", "recipes", "pyproject.toml")
MODELS = [
    f"transformers.models.{name}.modeling_{name}"
    for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "glm4_moe")
]
WARM = ["hypothesis.strategies", "numpy", "pydantic", "pytest", "torch", "torch.overrides", "transformers", *MODELS]
LOG = "tests.log"

SURVIVED, NO_IMPORT, NO_TESTS = "survived", 101, 102
ENDS = {0: SURVIVED, 1: "a test failed", 2: "tests could not be collected", NO_IMPORT: "it could not be imported"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    path: str  # from the root of the checkout
    line: int
    source: str  # of the whole file, changed


def mutants_of(path: str) -> list[Mutant]:
    """All mutants of one file, each once."""
    return [Mutant(path, fault.line, fault.source) for fault in all_mutants((ROOT / path).read_text(encoding="utf-8"))]


# --- trials --------------------------------------------------------------------------------------------------------------


class NoShrinking:
    """A plugin of pytest: that a property fails is enough."""

    def pytest_configure(self) -> None:
        """Called when the suite's own profile is there."""
        from hypothesis import Phase, settings

        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("mutation", settings.get_profile("antiphon"), max_examples=20, phases=phases)
        settings.load_profile("mutation")


def settle(scratch: str) -> None:
    """Begin a worker: in a copy of the checkout that is its own, with all but the package imported."""
    home = Path(tempfile.mkdtemp(dir=scratch))
    for name in COPIED:
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copied(ROOT / name, home / name)
    os.chdir(home)
    sys.path.insert(0, str(home))
    for name in [name for name in sys.modules if name.partition(".")[0] == "antiphon"]:
        del sys.modules[name]  # what mutants are made with
    for name in WARM:
        importlib.import_module(name)


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
