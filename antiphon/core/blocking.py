"""Running coroutines to their ends from code that is not asynchronous, in scripts and in notebooks alike."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple, Unpack, cast

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LONGEST_WAIT = 0.1  # seconds


def run_blocking(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result; Ctrl-C calls the handler that it has added to its event loop.

    A notebook runs its cells inside an event loop, in which no other can run; there the coroutine gets a thread of its own.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    with LoopThread() as thread:
        return thread.run(main)


class LoopThread:
    """An event loop in a thread of its own. Use as `with`."""

    def __enter__(self) -> Self:
        """Start the thread."""
        self._loop = _ForwardingLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what still runs, wait for its end, and end the thread."""
        self.submit(_cancel_other_tasks()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine as a task of the thread's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call a function in the thread's event loop."""
        self._loop.call_soon_threadsafe(callback)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine as a task of the thread's event loop, and return its result; for Ctrl-C see `wait`."""
        with self._forward_interrupts():
            return _wait(self.submit(work))

    def wait(self, future: "Future[T]") -> T:
        """Return a result; a Ctrl-C meanwhile is handled in the thread's event loop, or cancels if nobody handles it there."""
        with self._forward_interrupts():
            return _wait(future)

    @contextmanager
    def _forward_interrupts(self) -> Iterator[None]:
        """Handle Ctrl-C by the handler that was added to the event loop, from before the work begins that may cause one."""
        if threading.current_thread() is not threading.main_thread():  # which alone handles signals
            yield
            return
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._loop.interrupt is None:
            raise KeyboardInterrupt
        self.call_soon(self._loop.interrupt)


def _wait(future: "Future[T]") -> T:
    try:
        # A signal that comes just before a wait begins does not end the wait: it is handled after it.
        while not wait([future], LONGEST_WAIT).done:
            pass
        return future.result()
    except CancelledError:  # another class than that of coroutines
        raise asyncio.CancelledError from None
    except KeyboardInterrupt:
        future.cancel()
        raise


async def _cancel_other_tasks() -> None:
    tasks = asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


class _ForwardingLoop(asyncio.SelectorEventLoop):
    """An event loop outside the main thread, which no signal reaches: whoever waits for it forwards Ctrl-C."""

    interrupt: Callable[[], object] | None = None

    def add_signal_handler(self, sig: int, callback: Callable[[Unpack[Ts]], Any], *args: *Ts) -> None:
        if sig != signal.SIGINT:
            super().add_signal_handler(sig, callback, *args)
            return
        self.interrupt = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        if sig != signal.SIGINT:
            return super().remove_signal_handler(sig)
        found, self.interrupt = self.interrupt is not None, None
        return found
