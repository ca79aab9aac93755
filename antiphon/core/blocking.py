"""Running coroutines to their ends from code that is not asynchronous, in scripts and in notebooks alike."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple, Unpack, cast

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LONGEST_WAIT = 0.1  # seconds
ENDED, INTERRUPTED = "ended", "interrupted"


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
        self._thread = threading.Thread(target=self._serve, name="event-loop", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what still runs, wait for its end, and end the thread."""
        self.run(_cancel_other_tasks())
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
        with self._forward_interrupts() as events:
            return _wait(self.submit(work), events)

    def start(self, work: Coroutine[Any, Any, object], started: "Future[T]") -> tuple["Future[object]", T]:
        """Start a coroutine, and wait until it has set a result or has ended; return its own future, and the result.

        The caller makes sure that it sets one, or an error. For Ctrl-C see `wait`.
        """
        with self._forward_interrupts() as events:
            return self.submit(work), _wait(started, events)

    def wait(self, future: "Future[T]") -> T:
        """Return a result; a Ctrl-C meanwhile is handled in the thread's event loop, or cancels if nobody handles it there."""
        with self._forward_interrupts() as events:
            return _wait(future, events)

    def _serve(self) -> None:
        while True:
            try:
                self._loop.run_forever()
                return
            except (
                KeyboardInterrupt,
                SystemExit,
            ):  # ended a task; asyncio tells whoever waits for it, and leaves the loop
                pass

    @contextmanager
    def _forward_interrupts(self) -> Iterator["SimpleQueue[str]"]:
        """Handle Ctrl-C by the handler that was added to the event loop, from before the work begins that may cause one.

        Without such a handler the queue gets `INTERRUPTED`. Python's own handler raises wherever the main thread is: in a
        finalizer, where the error is ignored and so the Ctrl-C lost, or with a lock of the future taken, which the event loop
        then waits for forever. A `SimpleQueue` is safe to use in a signal handler.
        """
        events: SimpleQueue[str] = SimpleQueue()
        if threading.current_thread() is not threading.main_thread():  # which alone handles signals
            yield events
            return

        def interrupt(signum: int, frame: FrameType | None) -> None:
            if handler := self._loop.interrupt:
                self.call_soon(handler)
            else:
                events.put(INTERRUPTED)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield events
        finally:
            signal.signal(signal.SIGINT, before)
        if not events.empty():  # it came together with the result
            raise KeyboardInterrupt


def _wait(future: "Future[T]", events: "SimpleQueue[str]") -> T:
    future.add_done_callback(lambda _: events.put(ENDED))
    while True:
        try:
            # A signal that comes just before a wait begins does not end the wait: it is handled after it.
            event = events.get(timeout=LONGEST_WAIT)
        except Empty:
            continue
        if event == INTERRUPTED:
            future.cancel()
            raise KeyboardInterrupt
        try:
            return future.result()
        except CancelledError:  # another class than that of coroutines
            raise asyncio.CancelledError from None


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
