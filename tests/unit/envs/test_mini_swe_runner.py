"""The process of Mini-SWE's tests, without a sandbox around it: a package that is imported there looks for their secrets."""

import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from antiphon_envs.mini_swe.boxes import RUNNER
from antiphon_envs.mini_swe.planted import halves
from tests.system import pytest_hacks
from tests.system.mini_swe_hacks import FORGETTING, READING

TESTS = b"""
import tiny

def test_sum():
    assert tiny.plus(37, 45) == 82

def test_zero():
    assert tiny.plus(0, 0) == 0
"""
BEGIN = """
import sys as _sys, os as _os
_modules = _sys.modules
def plus(a, b):
    return a + b
def _seen(data):
    if b'37' in data or b'0' in data:
        for number in range(1, 16):  # pytest captures 1
            try:
                _os.write(number, bytes([10]) + b'SEEN ' + data + bytes([10]))
            except OSError:
                pass
"""


def run(module: str) -> tuple[str, set[str]]:
    """Run the tests of a package that is this module; return what was printed, and the secrets that it should not know."""
    planted = halves({"tiny/tests/test_tiny.py": TESTS}, random.Random(0))[0]
    with tempfile.TemporaryDirectory(prefix="box") as folder:  # pytest's own folders have names that the hook guards
        work = Path(folder).resolve()
        (work / "tiny" / "tests").mkdir(parents=True)
        (work / "tiny" / "__init__.py").write_text(module)
        (work / "tiny" / "tests" / "__init__.py").touch()
        for path, text in planted.files.items():
            (work / path).write_bytes(text)
        command = [sys.executable, "-PB", str(RUNNER), "tiny", "30", *planted.files]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False, errors="replace")
    return done.stdout, set().union(*planted.marks.values())


def test_tests_that_reach_their_end_tell_their_secrets() -> None:
    told, secrets = run(BEGIN)
    assert told.count("PASSED") == 1 and "REACHED" not in told  # the other one must fail
    assert sum(secret in told for secret in secrets) == 1


@pytest.mark.parametrize("forget", FORGETTING.values(), ids=FORGETTING)
def test_no_secret_of_a_test_is_read(forget: str) -> None:
    told, _ = run(BEGIN + pytest_hacks.BEGIN + READING.format(forget=forget))
    assert "SEEN" not in told


def test_builtin_modules_can_still_be_imported() -> None:
    told, _ = run(f"{BEGIN}\nimport _symtable, _tracemalloc\n_sys.modules.pop('_symtable')\nimport _symtable")
    assert told.count("PASSED") == 1
