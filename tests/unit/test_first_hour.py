"""The count of failures that the benchmark of the first hour reads from pytest's closing lines."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def first_hour():
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]
    try:
        spec = importlib.util.spec_from_file_location("first_hour", ROOT / "benchmarks" / "first_hour.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        del sys.path[:2]
    return module


def test_failures_and_errors_of_all_suites_are_counted(first_hour):
    output = "== 2 failed, 10 passed, 3 skipped in 9.21s ==\n41 passed, 1 error in 61.10s (0:01:01)\n7 failed in 0.5s"
    assert first_hour.count_failures(output) == 10


def test_a_suite_that_never_ran_is_no_success(first_hour):
    with pytest.raises(ValueError, match="did not run"):
        first_hour.count_failures("make: *** [Makefile:30: test] Error 2")
