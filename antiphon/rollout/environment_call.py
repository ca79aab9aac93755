"""Calls of a user's environment: the boundary at which its errors, and its silence, become data."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from antiphon.core.errors import SandboxError
from antiphon.core.user_errors import describe_error

T = TypeVar("T")


class EnvironmentCallError(Exception):
    """The user's environment raised or took too long; becomes a `Failure`, never a score."""


async def call_environment(seconds: float, parse: Callable[[Any], T], method: Callable[..., Any], *args: Any) -> T:
    """Call a method of an environment, plain or asynchronous.

    Args:
        seconds: Time-out of an asynchronous method.
        parse: Checks and converts what the method returns.
        method: The method.
        args: Its arguments.

    Raises:
        EnvironmentCallError: If the method or `parse` raises, or time runs out.
    """
    limit = asyncio.timeout(seconds)
    try:
        result = method(*args)
        if inspect.isawaitable(result):
            async with limit:
                result = await result
        return parse(result)
    except Exception as error:
        late = f"{method.__name__} took more than {seconds:g} s" if limit.expired() else ""
        # One of another process arrives as `SandboxError`, described there.
        said = str(error) if isinstance(error, SandboxError) else describe_error(error, method)
        raise EnvironmentCallError(late or said) from error


def unparsed(result: Any) -> Any:
    """Return what a method returned as it is."""
    return result
