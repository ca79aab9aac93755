"""Runs inside of the sandbox: a solution in one process, its tests in another.

Tests in the process of what they test can be lied to: by an object that equals everything, a patched builtin, an exit in time.
So the solution's process is forked before the tests are read, and never has them: it is told its own source, and which of its
functions to call with which arguments. What it returns arrives as plain values (numbers, texts, containers), made anew on the
side of the tests; what is none stays there, and can be called and looked into from here (`Remote`). The tests' process is
closed to its child.

Standard input is JSON: {"solution", "setup", "cases" or "pytest", "entry_point", "module", "seconds"}. Every case becomes a
line of JSON on standard output: {"outcome": passed, failed, timeout or untestable, "detail"}; a solution that cannot be loaded
becomes one that is `broken`. After a time-out nothing more is run: the caller begins again with the cases that are left.

This file is read as text, and imports nothing of ours.
"""

import builtins
import ctypes
import io
import json
import os
import select
import signal
import struct
import sys
import time
import types
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

HEADER = struct.Struct("<I")
PR_SET_DUMPABLE = 4
SCALARS: tuple[tuple[str, Any, Callable[[Any], Any], Callable[[Any], Any]], ...] = (  # name, type, to JSON, and back
    ("float", float, float.__repr__, float),
    ("complex", complex, complex.__repr__, complex),
    ("bytes", bytes, bytes.hex, bytes.fromhex),
    ("fraction", Fraction, str, Fraction),
    ("decimal", Decimal, str, Decimal),
    ("range", range, lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
)
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class UntestableError(Exception):
    """The tests do what cannot be done from another process: that says nothing about the solution."""


class SolutionError(Exception):
    """An exception of a type that is the solution's own."""


class TimedOut(BaseException):
    """The solution did not answer in time."""


# --- values between the processes ------------------------------------------------------------------------------------------


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """JSON of a value; of what is not plain, the number that `keep` gives it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    for name, kind, to, _ in SCALARS:
        if isinstance(value, kind):
            return [name, to(value)]
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return [name, [encode(item, keep) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, keep), encode(item, keep)] for key, item in value.items()]]
    if isinstance(value, Iterator):
        return ["list", [encode(item, keep) for item in value]]
    return ["kept", keep(value)]


def decode(data: Any, kept: Callable[[int], Any]) -> Any:
    """The value again."""
    if not isinstance(data, list):
        return data
    name, content = data
    if name == "kept":
        return kept(content)
    if name == "dict":
        return {decode(key, kept): decode(item, kept) for key, item in content}
    if name in CONTAINERS:
        return CONTAINERS[name](decode(item, kept) for item in content)
    return {scalar: back for scalar, _, _, back in SCALARS}[name](content)


def send(descriptor: int, message: Any) -> None:
    """Write a message to a pipe."""
    data = json.dumps(message).encode()
    left = memoryview(HEADER.pack(len(data)) + data)
    while left:
        left = left[os.write(descriptor, left) :]


def receive(descriptor: int, deadline: float | None = None) -> Any:
    """The next message; None at the end. `TimedOut` after `deadline`, seconds of the monotonic clock."""
    header = _exactly(descriptor, HEADER.size, deadline)
    if not header:
        return None
    (length,) = HEADER.unpack(header)
    data = _exactly(descriptor, length, deadline)
    return json.loads(data) if data else None


def _exactly(descriptor: int, count: int, deadline: float | None) -> bytes:
    """So many bytes; none at the end."""
    data = bytearray()
    while len(data) < count:
        patience = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        if not select.select([descriptor], [], [], patience)[0]:
            raise TimedOut
        more = os.read(descriptor, count - len(data))
        if not more:
            return b""
        data += more
    return bytes(data)


# --- the process of the solution -------------------------------------------------------------------------------------------


def serve(reading: int, writing: int) -> None:
    """Load the solution; then do what is asked, until nobody asks any more."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    module = types.ModuleType("solution")
    kept: list[Any] = [module]

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if "source" in asked:
            exec(compile(asked["source"], "solution.py", "exec"), module.__dict__)
            return {"value": encode([name for name in vars(module) if not name.startswith("_")], keep)}
        subject = kept[asked["on"]]
        if "get" in asked:
            return {"value": encode(getattr(subject, asked["get"]), keep)}
        args, kwargs = (decode(asked[name], kept.__getitem__) for name in ("args", "kwargs"))
        value = encode(subject(*args, **kwargs), keep)
        return {"value": value, "args": encode(args, keep)}

    while (asked := receive(reading)) is not None:
        try:
            reply = answer(asked)
        except BaseException as error:  # noqa: BLE001 - the tests are told
            reply = {"raised": type(error).__name__, "text": str(error)[:500]}
        send(writing, reply)


# --- the process of the tests ----------------------------------------------------------------------------------------------


class Solution:
    """The other process, as the tests have it."""

    def __init__(self, reading: int, writing: int, child: int) -> None:
        self._reading, self._writing, self._child = reading, writing, child
        self.deadline = 0.0

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Its reply; raises what it raised, or a builtin exception of that name."""
        try:
            send(self._writing, asked)
            reply = receive(self._reading, self.deadline)
        except BrokenPipeError:
            reply = None
        except TimedOut:
            os.kill(self._child, signal.SIGKILL)
            raise
        if reply is None:
            raise SolutionError("the solution's process has ended")
        if "raised" in reply:
            known = getattr(builtins, reply["raised"], None)
            if isinstance(known, type) and issubclass(known, Exception):
                raise known(reply["text"])
            raise SolutionError(reply["text"])
        return dict(reply)

    def load(self, source: str) -> list[str]:
        """Run the solution; returns what it defines."""
        return [str(name) for name in self._value(self.ask(source=source))]

    def get(self, on: int, name: str) -> Any:
        """An attribute of what it keeps under a number; 0 is its module."""
        return self._value(self.ask(on=on, get=name))

    def call(self, on: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what it keeps under a number. Lists, sets and dicts among `args` change here as they did there."""
        reply = self.ask(on=on, args=encode(list(args), _number), kwargs=encode(kwargs, _number))
        for mine, theirs in zip(args, decode(reply["args"], self._remote), strict=True):
            if isinstance(mine, list) and mine != theirs:
                mine[:] = theirs
            elif isinstance(mine, set | dict) and mine != theirs:
                mine.clear()
                mine.update(theirs)
        return self._value(reply)

    def _value(self, reply: dict[str, Any]) -> Any:
        return decode(reply["value"], self._remote)

    def _remote(self, number: int) -> "Remote":
        return Remote(self, number)


def _number(value: Any) -> int:
    if isinstance(value, Remote):
        return int(vars(value)["number"])
    raise UntestableError(f"a {type(value).__name__} cannot be sent to the solution")


class Remote:
    """An object of the solution: it can be called and looked into. It equals no plain value."""

    def __init__(self, solution: Solution, number: int) -> None:
        vars(self).update(solution=solution, number=number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self)
        return own["solution"].call(own["number"], args, kwargs)

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        return own["solution"].get(own["number"], name)

    def __len__(self) -> int:
        return int(self.__getattr__("__len__")())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__getattr__("__iter__")())

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)

    def __contains__(self, item: Any) -> bool:
        return self.__getattr__("__contains__")(item) is True

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote) and other is not self:
            raise UntestableError("two objects of the solution are compared")
        return other is self

    __hash__ = object.__hash__


class Report:
    """What is told of the cases. What tests print goes nowhere."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        sys.stdout = io.StringIO()

    def tell(self, outcome: str, detail: object = "") -> None:
        """Of the next case."""
        os.write(self._out, json.dumps({"outcome": outcome, "detail": str(detail)[:300]}).encode() + b"\n")


def run_cases(asked: dict[str, Any], solution: Solution, names: list[str], report: Report) -> None:
    """Run each case by itself, in what `setup` and the solution define; nothing of the solution stands for a builtin."""
    entry_point = asked.get("entry_point")
    space = {name: solution.get(0, name) for name in names if not hasattr(builtins, name)}
    exec(compile(asked.get("setup", ""), "setup", "exec"), space)
    if entry_point:
        space[entry_point] = solution.get(0, entry_point)
    for number, case in enumerate(asked["cases"]):
        solution.deadline = time.monotonic() + asked["seconds"]
        try:
            exec(compile(case, f"case {number}", "exec"), dict(space))
        except UntestableError as error:
            report.tell("untestable", error)
        except TimedOut:
            report.tell("timeout", f"no answer within {asked['seconds']:g} s")
            return
        except BaseException as error:  # noqa: BLE001 - told of the case
            report.tell("failed", f"{type(error).__name__}: {error}")
        else:
            report.tell("passed")


def run_pytest(asked: dict[str, Any], solution: Solution, names: list[str], report: Report) -> None:
    """Run a file of tests that imports the solution as a module; each test is a case."""
    import pytest

    class Plugin:
        def pytest_runtest_setup(self) -> None:
            solution.deadline = time.monotonic() + asked["seconds"]

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.failed:
                tell("passed" if report.passed else "failed", report.nodeid)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                tell("failed", report.longrepr)

    tell = report.tell
    module = types.ModuleType(asked.get("module") or "solution")
    vars(module).update({name: solution.get(0, name) for name in names})
    sys.modules[module.__name__] = module
    Path("test_cases.py").write_text(asked["pytest"], encoding="utf-8")
    pytest.main(["-q", "-p", "no:cacheprovider", "test_cases.py"], plugins=[Plugin()])


def main() -> None:
    """Fork the solution's process; then read what it is about."""
    (their_end, to_solution), (from_solution, our_end) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(to_solution)
        os.close(from_solution)
        serve(their_end, our_end)
        os._exit(0)
    os.close(their_end)
    os.close(our_end)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    asked = json.load(sys.stdin)
    report, solution = Report(), Solution(from_solution, to_solution, child)
    solution.deadline = time.monotonic() + asked["seconds"]
    try:
        names = solution.load(asked["solution"])
        entry_point = asked.get("entry_point")
        if entry_point and entry_point not in names:
            raise SolutionError(f"it defines no {entry_point!r}")
    except TimedOut:
        report.tell("broken", f"it did not load within {asked['seconds']:g} s")
    except Exception as error:  # noqa: BLE001 - told of the solution
        report.tell("broken", f"{type(error).__name__}: {error}")
    else:
        (run_pytest if "pytest" in asked else run_cases)(asked, solution, names, report)
    os._exit(0)


if __name__ == "__main__":
    main()
