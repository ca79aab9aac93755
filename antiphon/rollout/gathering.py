"""Waiting for several coroutines at once."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_or_cancel(running: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all, in their order; if one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as owner:
            tasks = [owner.create_task(one) for one in running]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]
