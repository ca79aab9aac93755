"""Early ends of a run: by an error of any part, or by Ctrl-C."""

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from antiphon.core.errors import NonFiniteError, first_error

T = TypeVar("T")

# Thresholds of Python's garbage collector: objects of a run live long, and the defaults scan them all the time.
COLLECT = (50_000, 20, 20)


async def run_supervised(
    guards: Sequence[Coroutine[Any, Any, None]], main: Callable[[asyncio.TaskGroup], Awaitable[T]]
) -> T:
    """Run `main` in a task group beside `guards`, which end only by raising; of all errors, raise the first."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*COLLECT)
    try:
        async with asyncio.TaskGroup() as owner:
            watchers = [owner.create_task(guard, name="guard") for guard in guards]
            result = await main(owner)
            for watcher in watchers:
                watcher.cancel()
        return result
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def name_step_in_errors(name: str) -> Iterator[None]:
    """Name the step in the error about a gradient that is not finite."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{name}: {error}") from error


class StopSignal:
    """Request to end a run after the step in hand, by a call or by Ctrl-C."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def is_set(self) -> bool:
        """True once the run is to end."""
        return self._event.is_set()

    def set(self) -> None:
        """End the run after the step in hand."""
        self._event.set()

    @contextmanager
    def on_interrupt(self, report: Callable[[str], None]) -> Iterator[None]:
        """Stop after the step in hand on the first Ctrl-C, and at once on the second."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def interrupt() -> None:
            if self.is_set and task is not None:
                task.cancel()
            self.set()
            report("stopping after this step; Ctrl-C again stops at once")

        with suppress(ValueError, RuntimeError):  # only the main thread receives signals
            loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            with suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(signal.SIGINT)

    async def unless_set(self, awaitable: Awaitable[T]) -> T | None:
        """Return the result, or None if the run is to end first."""
        work, stop = asyncio.ensure_future(awaitable), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            work.cancel()
            stop.cancel()
