"""Runs in the sandbox of the tests: judges a solution that is in another one, on the other side of two pipes.

Nothing that is here can be read or written by the solution (`code.solution`); what crosses between the two is plain data
(`code.frames`), and what the tests have of the solution is asked of it by name (`code.session`).

Standard input is a job: JSON, with the keys of `Job`. Standard output gets a line of JSON when the solution's process is there,
one for each case, and one at the end, each with the job's nonce.

This file is read as text, and imports nothing of ours but those two.
"""

import importlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from antiphon.tasks.rewards.code.session import Job, RefusedError, Session, SolutionError

TESTS = "test_solution.py"
SESSION = " session"  # no name of a solution


# --- verdicts --------------------------------------------------------------------------------------------------------------


class Report:
    """Reports the outcomes of cases; output of the tests is dropped."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._out = os.dup(1)
        os.set_inheritable(self._out, False)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(null, descriptor)

    def tell(self, kind: str, outcome: str = "", detail: object = "") -> None:
        """Write a line; `kind` is `ready`, `case` or `end`, `outcome` of a case `passed`, `failed` or `timeout`."""
        told = {"nonce": self._nonce, "kind": kind, "outcome": outcome, "detail": str(detail)[:300]}
        os.write(self._out, json.dumps(told).encode() + b"\n")

    def judge(self, session: Session, error: object) -> None:
        """Tell of the case that has just ended; `error` is what is wrong with it, or None."""
        session.check_stops()
        if session.timed_out:
            self.tell("case", "timeout", session.ended)
        elif wrong := session.refused or session.ended or error:
            self.tell("case", "failed", f"the solution: {wrong}" if wrong is session.ended else wrong)
        else:
            self.tell("case", "passed")
        session.refused = ""


def run_cases(job: Job, session: Session, report: Report) -> None:
    """Run each case by itself, with the names of `setup` and the solution.

    After a time-out, or when the solution's process has ended, no more cases run: the caller starts again with those left.
    """
    space: dict[str, Any] = {"__name__": "tests"}
    error = _attempt(session, job["seconds"], lambda: _set_up(job, session, space))
    if error is not None:
        report.tell("case", "timeout" if session.timed_out else "broken", session.ended or error)
        return
    for number, case in enumerate(job["cases"]):
        run = partial(exec, compile(case, f"case {number}", "exec", dont_inherit=True), dict(space))
        report.judge(session, _attempt(session, job["seconds"], run))
        if session.ended:
            return


def _set_up(job: Job, session: Session, space: dict[str, Any]) -> None:
    found = session.load(job)
    missing = [name for name in job["declared"] if name not in found]
    if missing:
        raise SolutionError(f"it defines no {missing[0]!r}")
    space.update({name: importlib.import_module(module) for name, module in job["modules"].items()})
    space.update(found)
    exec(compile(job["setup"], "setup", "exec", dont_inherit=True), space)
    space.update({name: found[name] for name in job["declared"]})
    if session.refused or session.ended:
        raise RefusedError(session.refused or session.ended)


def _attempt(session: Session, seconds: float, work: Callable[[], object]) -> str | None:
    """Do some of the tests' work; return what went wrong, if anything did."""
    try:
        with session.limited(seconds):
            work()
    except BaseException as error:  # noqa: BLE001 - told of the case
        return f"{type(error).__name__}: {error}"
    return None


class Module(types.ModuleType):
    """The solution's module, as a file of tests imports it: each attribute is asked for when it is needed."""

    def __init__(self, job: Job, session: Session) -> None:
        super().__init__(job["module"])
        vars(self).update({"__all__": sorted(job["names"]), SESSION: session})

    def __getattr__(self, name: str) -> Any:
        if name not in self.__all__:
            raise AttributeError(f"the tests take no {name!r} of the solution: a task may declare names")
        return vars(self)[SESSION].attribute(name)


def run_pytest(job: Job, session: Session, report: Report) -> None:
    """Run a file of tests that imports the solution as a module; each test is a case."""
    if (error := _attempt(session, job["seconds"], lambda: session.load(job))) is not None:
        report.tell("case", "timeout" if session.timed_out else "broken", error)
        return
    sys.modules[job["module"]] = Module(job, session)
    Path(TESTS).write_text(job["pytest"], encoding="utf-8")
    here = os.getcwd()
    plain = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", here, "--confcutdir", here, "--noconftest"]
    plain += ["--import-mode=importlib", "-o", "empty_parameter_set_mark=fail_at_collect"]
    if (code := _run_file(plain, job["seconds"], session, report)) not in ("OK", "TESTS_FAILED"):
        report.tell("case", "failed", f"pytest ended with {code}")


def _run_file(options: list[str], seconds: float, session: Session, report_to: Report) -> str:
    """Run the file with pytest, and tell of each test; return the name of pytest's exit code."""
    import pytest

    class Plugin:
        def __init__(self) -> None:
            self.error: object = None
            self.called = False

        @pytest.hookimpl(hookwrapper=True)
        def pytest_make_collect_report(self) -> Iterator[None]:
            with session.limited(seconds):
                yield

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_setup(self) -> Iterator[None]:
            self.error, self.called = None, False
            with session.limited(seconds):
                yield

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_call(self) -> Iterator[None]:
            with session.limited(seconds):
                yield

        def pytest_runtest_logreport(self, report: Any) -> None:
            self.error = self.error or (report.nodeid if report.failed else None)
            self.called = self.called or (report.when == "call" and report.passed)
            if report.when == "teardown" and (self.error or self.called or session.refused or session.ended):
                report_to.judge(session, self.error)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                report_to.judge(session, report.longrepr)

    code = pytest.main([*options, TESTS], plugins=[Plugin()])
    return pytest.ExitCode(code).name


def main() -> NoReturn:
    """Judge the solution on the other side of the pipes."""
    sys.path[:] = [path for path in sys.path if path]  # nothing is imported from the working directory
    sys.dont_write_bytecode = True
    job: Job = json.load(sys.stdin)
    report, session = Report(job["nonce"]), Session(job)
    run = run_cases
    if "pytest" in job:
        importlib.import_module("pytest")
        run = run_pytest
    session.greet()
    report.tell("ready")
    run(job, session, report)
    report.tell("end")
    os._exit(0)


if __name__ == "__main__":
    main()
