"""The seam between a worker and its controller.

A `Worker` is an object that lives in a process (or thread) of its own; the controller holds a `WorkerHandle`. Calls are
answered in the order they arrive; between calls the worker advances its own work, if it has any. Where workers run is
the cluster's business.
"""

from collections.abc import Callable
from typing import Any, Protocol

from antiphon.core.errors import AntiphonError

Emit = Callable[[Any], None]


class Worker:
    """Base of what runs in a worker process. Any public method can be called through the handle."""

    emit: Emit  # sends an event to the controller; set before the first call

    def advance(self) -> bool:
        """Do one unit of background work; return whether there is more to do."""
        return False

    def close(self) -> None:
        """Give back what the worker holds."""


class WorkerHandle(Protocol):
    """A worker as the controller sees it. A worker that dies fails every open call with `WorkerDiedError`."""

    name: str

    async def call(self, method: str, *args: Any) -> Any:
        """Run `method` in the worker. Its `AntiphonError` is raised here; any other error is the worker's death."""

    def send(self, method: str, *args: Any) -> None:
        """Run `method` in the worker without waiting for, or getting, an answer."""

    def on_event(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with everything the worker emits."""

    def on_death(self, callback: Callable[[AntiphonError], None]) -> None:
        """Call `callback` once the worker has ended, with the error that its callers get."""

    async def died(self) -> None:
        """Return never; raise `WorkerDiedError` when the worker ends before `close`."""

    async def close(self) -> None:
        """End the worker: politely first, by force after a grace period."""

    def kill(self) -> None:
        """End the worker by force; it then counts as one that died."""
