"""Errors of a user's code in one line, with the file and line that they come from."""

import functools
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar, cast

from antiphon.core.errors import AntiphonError, UserCodeError, first_error

F = TypeVar("F", bound=Callable[..., Any])

_OURS = (str(Path(__file__).parents[1]),)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def describe_error(error: BaseException, called: Any = None) -> str:
    """Return an error in one line: its type, the first line of its message, and the place in the user's code.

    The place is the innermost frame in a file of the user, which is none of Antiphon, Python or an installed package. If there
    is no such frame, it is the innermost one in the file of `called`, or else the definition of `called`.

    Args:
        error: The error, with its traceback.
        called: Function, class or instance of the user that was called, or that returned a wrong value.
    """
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    place = _place_of(error, _code_of(called))
    return f"{text} ({place})" if place else text


def name_user_errors(function: F, key: str, name: str) -> F:
    """Return a user's function that raises `UserCodeError` for its errors, with the setting, the file and the line.

    Args:
        function: The function; it may be a coroutine function.
        key: Dotted key of the configuration under which it is named.
        name: Its name there.
    """

    @contextmanager
    def convert() -> Iterator[None]:
        try:
            yield
        except AntiphonError:
            raise
        except Exception as error:  # named boundary: the user's function, which may have a task group
            first = first_error(error)
            if isinstance(first, AntiphonError) or not isinstance(first, Exception):
                raise first from error
            message = f"{key}: {name} failed: {describe_error(first, function)}"
            raise UserCodeError(message, key=key, value=name) from error

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with convert():
            result = function(*args, **kwargs)
        return wait(result) if inspect.isawaitable(result) else result

    async def wait(result: Any) -> Any:
        with convert():
            return await result

    if not hasattr(function, "__qualname__"):  # an instance
        call.__qualname__ = name
    return cast(F, call)


def find_definition(called: Any) -> str:
    """Return file and line of the definition of a function, class or instance; empty if it is Antiphon's or not Python's."""
    code = _code_of(called)
    if code is None or _is_below(code.co_filename, _OURS):
        return ""
    return _format_place(code.co_filename, code.co_firstlineno)


def _place_of(error: BaseException, code: CodeType | None) -> str:
    if isinstance(error, SyntaxError) and error.filename and not _is_below(error.filename, _OURS + _INSTALLED):
        return _format_place(error.filename, error.lineno or 1)
    frames = [(frame.filename, frame.lineno or 1) for frame in traceback.extract_tb(error.__traceback__)]
    users = [frame for frame in frames if not _is_below(frame[0], _OURS + _INSTALLED)]
    if not users and code is not None and not _is_below(code.co_filename, _OURS):
        definition = (code.co_filename, code.co_firstlineno)
        users = [definition, *(frame for frame in frames if frame[0] == code.co_filename)]
    return _format_place(*users[-1]) if users else ""


def _is_below(file: str, folders: tuple[str, ...]) -> bool:
    """Return True if a file is in one of the folders, or part of the interpreter."""
    return file.startswith(("<frozen ", "<string>")) or file.startswith(tuple(folder + os.sep for folder in folders))


def _format_place(file: str, line: int) -> str:
    """Return `file:line`, with a relative path for a file in the working directory."""
    here = os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{line}"


def _code_of(called: Any) -> CodeType | None:
    """Return the code of what is called, behind partial functions, decorators and classes."""
    while True:
        if isinstance(called, functools.partial):
            called = called.func
        elif hasattr(called, "__wrapped__"):
            called = called.__wrapped__
        else:
            break
    if isinstance(called, type):
        called = next((vars(called)[name] for name in ("__call__", "__init__") if name in vars(called)), None)
    elif not hasattr(called, "__code__") and not hasattr(called, "__func__"):
        called = type(called).__call__ if callable(called) else None
    code = getattr(getattr(called, "__func__", called), "__code__", None)
    return code if isinstance(code, CodeType) else None
