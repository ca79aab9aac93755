"""SWE-bench's rule: an attempt is right if its log says that all tests of `FAIL_TO_PASS` and `PASS_TO_PASS` pass.

The source is `swebench.harness.grading`, version 5. A test that is not in the log has failed.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from antiphon_envs.task_images.log_parsers import ERROR, FAILED, PASSED, SKIPPED, XFAIL, Parser, Statuses

_MARK = ">" * 5  # which each mark of the published harness begins with
START, END, EXIT_CODE = (f"{_MARK} {text}" for text in ("Start Test Output", "End Test Output", "Test Exit Code"))
# A log with one of these says nothing about tests.
BROKEN = tuple(f"{_MARK} {text}" for text in ("Patch Apply Failed", "Reset Failed", "Tests Errored", "Tests Timed Out"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The verdict on a log."""

    resolved: bool
    fail_to_pass: float
    """Share of the tests of `FAIL_TO_PASS` that pass; 1 if there are none."""
    pass_to_pass: float


def record_exit_code(script: str) -> str:
    """Return an evaluation script that also writes the exit code of its test command, behind the end of the tests' output."""
    lines = script.split("\n")
    for number, line in enumerate(lines):
        if END in line:
            return "\n".join(
                [*lines[:number], "ANTIPHON_CODE=$?", line, f'echo "{EXIT_CODE}: $ANTIPHON_CODE"', *lines[number + 1 :]]
            )
    return script


def read_statuses(log: str, parse: Parser) -> Statuses:
    """Return the statuses of the tests in the log of an evaluation; none if the log is not one of a whole run."""
    if any(mark in log for mark in BROKEN) or START not in log or END not in log:
        return {}
    found = parse(log.split(START)[1].split(END)[0]) or parse(log)
    code = re.search(rf"{re.escape(EXIT_CODE)}:\s*(-?\d+)", log)
    failed = code is not None and int(code[1]) != 0
    if failed and not {FAILED, ERROR} & {*found.values()}:
        return {}  # what says that nothing failed is not the test command, which did
    return found


def grade(statuses: Statuses, fail_to_pass: Iterable[str], pass_to_pass: Iterable[str]) -> Report:
    """Compare statuses with the tests that must pass. A test that passed before may also be skipped."""
    repaired = [_status(name, statuses) in (PASSED, XFAIL) for name in fail_to_pass]
    kept = [_status(name, statuses) in (PASSED, XFAIL, SKIPPED) for name in pass_to_pass]
    return Report(
        resolved=bool(statuses) and all(repaired) and all(kept),
        fail_to_pass=_share(repaired),
        pass_to_pass=_share(kept),
    )


def _share(results: list[bool]) -> float:
    return sum(results) / len(results) if results else 1.0


def _status(name: str, statuses: Statuses) -> str | None:
    """Return the status of a test; rows have names that are cut within a parameter, which stand for those that they begin."""
    if name not in statuses and name.count("[") > name.count("]"):
        begun = [status for each, status in statuses.items() if each.startswith(name)]
        alike = len({status in (PASSED, XFAIL) for status in begun}) == 1
        return begun[0] if alike else None
    return statuses.get(name)
