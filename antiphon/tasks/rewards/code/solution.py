"""Runs in the sandbox of a solution: loads it, and does with it what the judge asks, until nobody asks any more.

Nothing here keeps a solution from anything: it shares this process, and may write to the pipe what it likes. The judge
(`code.harness`) takes it so. What is here serves honest solutions.

This file is read as text, and imports nothing of ours but `code.frames`.
"""

import importlib
import itertools
import os
import sys
import types
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

from antiphon.tasks.rewards.code.frames import ABILITIES, FrameError, decode, encode, receive, send

# What Python does with objects that need not have the method.
BY_OTHERS: dict[str, Callable[..., Any]] = {
    "__bool__": bool,
    "__contains__": lambda subject, item: item in subject,
    "__iter__": iter,
    "__reversed__": reversed,
}


class NonBuiltinError(Exception):
    """Stands for an exception class of the tests that is not built in."""


class Solution:
    """The module of the solution, and all of its objects that the judge knows by number."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._module = types.ModuleType("solution")
        self._kept: list[Any] = [self._module]
        self._numbers: dict[int, int] = {}
        self._classes: list[int] = []
        self._pending: dict[int, BaseException] = {}  # of iterators that have raised
        self._under_way = ""

    def serve(self) -> None:
        """Say hello, then answer one request after the other."""
        send(self._writing, {"hello": True})
        while True:
            self._answer(receive(self._reading))

    def _answer(self, asked: dict[str, Any]) -> None:
        before, self._under_way = self._under_way, asked["id"]
        try:
            reply = getattr(self, f"_{asked['op']}")(asked)
        except BaseException as error:  # noqa: BLE001 - the tests are told
            reply = {"raised": self._describe(error)}
        self._under_way = before
        try:
            send(self._writing, {"id": asked["id"], **reply})
        except (FrameError, ValueError) as error:
            send(self._writing, {"id": asked["id"], "raised": self._describe(error)})

    def _describe(self, error: BaseException) -> dict[str, Any]:
        return {
            "types": [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"],
            "classes": [number for number in self._classes if isinstance(error, self._kept[number])],
            "text": _text(error),
            "number": self._number(error, "kept")[1][0],
        }

    # --- what can be asked ------------------------------------------------------------------------------------------------

    def _load(self, asked: dict[str, Any]) -> dict[str, Any]:
        sys.modules["solution"] = self._module
        exec(compile(asked["source"], "solution.py", "exec", dont_inherit=True), vars(self._module))
        defined = vars(self._module)
        return {"value": encode({name: defined[name] for name in asked["names"] if name in defined}, self._number)}

    def _get(self, asked: dict[str, Any]) -> dict[str, Any]:
        return self._value(getattr(self._kept[asked["on"]], asked["name"]))

    def _set(self, asked: dict[str, Any]) -> dict[str, Any]:
        setattr(self._kept[asked["on"]], asked["name"], decode(asked["value"], self._named))
        return {"value": None}

    def _call(self, asked: dict[str, Any]) -> dict[str, Any]:
        subject = self._kept[asked["on"]]
        args, kwargs = decode(asked["args"], self._named), decode(asked["kwargs"], self._named)
        value = subject(*args, **kwargs)
        made = isinstance(subject, type) and type(value).__module__ == "solution"  # whatever it is derived from
        reply = {"value": self._number(value, "kept")} if made else self._value(value)
        return reply | ({"args": encode(args, self._number)} if asked["in_place"] else {})

    def _method(self, asked: dict[str, Any]) -> dict[str, Any]:
        subject, args = self._kept[asked["on"]], decode(asked["args"], self._named)
        if asked["name"] in BY_OTHERS:
            return self._value(BY_OTHERS[asked["name"]](subject, *args))
        return self._value(getattr(type(subject), asked["name"])(subject, *args))

    def _await(self, asked: dict[str, Any]) -> dict[str, Any]:
        return self._value(importlib.import_module("asyncio").run(self._kept[asked["on"]]))

    def _next(self, asked: dict[str, Any]) -> dict[str, Any]:
        number = asked["on"]
        items = list[Any]()
        try:
            if number in self._pending:
                raise self._pending.pop(number)
            for item in itertools.islice(self._kept[number], asked["count"]):
                items.append(encode(item, self._number))
        except BaseException as error:
            if not items:
                raise
            self._pending[number] = error
        return {"value": ["list", items]}

    # --- values -----------------------------------------------------------------------------------------------------------

    def _value(self, value: Any) -> dict[str, Any]:
        if id(value) in self._numbers and not isinstance(value, Iterator):  # as it was made
            return {"value": self._number(value, "kept")}
        return {"value": encode(value, self._number)}

    def _number(self, value: Any, tag: str) -> list[Any]:
        if isinstance(value, Coroutine):
            tag = "awaitable"
        if isinstance(value, Callback):
            return ["callback", value.number]
        number = self._numbers.setdefault(id(value), len(self._kept))
        if number == len(self._kept):
            self._kept.append(value)
            if isinstance(value, type):
                self._classes.append(number)
        if tag == "kept":
            return [tag, [number, [*ABILITIES.intersection(set().union(*map(vars, type(value).__mro__)))]]]
        return [tag, number]

    def _named(self, tag: str, content: Any) -> Any:
        if tag == "kept":
            return self._kept[content]
        if tag == "named":
            found: Any = importlib.import_module(content[0])
            for name in content[1].split("."):
                found = getattr(found, name)
            return found
        return Callback(self, content)

    def call_back(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have the judge call a function of the tests; meanwhile it may ask other things."""
        told = {"args": encode(args, self._number), "kwargs": encode(kwargs, self._number)}
        send(self._writing, {"id": self._under_way, "callback": number, **told})
        while "op" in (reply := receive(self._reading)):
            self._answer(reply)
        if "raised" in reply:
            module, name, text = reply["raised"]
            kind = getattr(importlib.import_module(module), name, NonBuiltinError) if module else NonBuiltinError
            raise kind(text)
        return decode(reply["value"], self._named)


def _text(error: BaseException) -> str:
    shown = error.args[0] if isinstance(error, KeyError) and len(error.args) == 1 else error  # which shows its repr
    try:
        return str(shown)[:500]
    except Exception:  # noqa: BLE001 - the solution's own
        return ""


class Callback:
    """A function of the tests, as the solution sees it."""

    def __init__(self, solution: Solution, number: int) -> None:
        self.solution, self.number = solution, number
        self.__name__ = self.__qualname__ = "function"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in the judge's process."""
        return self.solution.call_back(self.number, args, kwargs)


def main() -> NoReturn:
    """Keep the pipe, give the solution streams that lead nowhere, and serve."""
    reading, writing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    end = os._exit
    try:
        Solution(reading, writing).serve()
    finally:
        end(0)


if __name__ == "__main__":
    main()
