"""Calls of a user's environment: the boundary at which its errors, and its silence, become data."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

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
        raise EnvironmentCallError(late or f"{type(error).__name__}: {error}") from error
