"""A worker whose calls run beside each other."""

import asyncio

from antiphon.core.errors import DataError
from antiphon.core.rpc import AsyncWorker, handlers_of


class Surface:
    """Calls that a client forwards."""

    async def add(self, left, right=10):
        """Return a sum."""
        raise NotImplementedError

    async def wait_for_open(self):
        """Return once `open` was called."""
        raise NotImplementedError

    async def open(self):
        """Let `wait_for_open` return."""
        raise NotImplementedError

    async def fail(self):
        """Raise `DataError`."""
        raise NotImplementedError


class Served(Surface):
    """Their implementation."""

    def __init__(self):
        self._opened = asyncio.Event()

    async def add(self, left, right=10):
        return left + right

    async def wait_for_open(self):
        await self._opened.wait()
        return "open"

    async def open(self):
        self._opened.set()

    async def fail(self):
        raise DataError("not here", path="a.json")


class SurfaceWorker(AsyncWorker):
    """Serves `Surface`."""

    async def _live(self):
        async with asyncio.TaskGroup() as owner:
            await self._serve(owner, handlers=handlers_of(Served()))


class AskingWorker(AsyncWorker):
    """Serves `ask`, which asks the client's `reply` the same."""

    async def _live(self):
        async with asyncio.TaskGroup() as owner:
            await self._serve(owner, handlers={"ask": lambda *args: self._ask("reply", *args)})


class BrokenWorker(AsyncWorker):
    """Dies as it starts."""

    async def _live(self):
        await asyncio.sleep(0)
        raise ValueError("this was too much")


class SilentWorker(AsyncWorker):
    """Never comes to serve."""

    async def _live(self):
        await asyncio.Event().wait()
