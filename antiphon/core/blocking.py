"""Running a coroutine to its end from code that is not asynchronous, in scripts and in notebooks alike."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def run_blocking(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result; Ctrl-C calls the handler that it has added to its event loop.

    A notebook runs its cells inside an event loop, in which no other can run; there the coroutine gets a thread of its own.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    return LoopThread(main).wait()


class LoopThread:
    """A thread that runs a coroutine in an event loop of its own."""

    def __init__(self, main: Coroutine[Any, Any, Any]) -> None:
        """Start the thread."""
        self._loop = _ForwardingLoop()
        self._result = Future[Any]()
        self._thread = threading.Thread(target=self._run, args=(main,), name="run", daemon=True)
        self._thread.start()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call a function in the thread's event loop; do nothing if it has ended."""
        if not self._result.done():
            self._loop.call_soon_threadsafe(callback)

    def wait(self) -> Any:
        """Return the coroutine's result; a Ctrl-C meanwhile is handled in the thread's event loop."""
        while True:
            try:
                return self._result.result()
            except KeyboardInterrupt:
                if self._loop.interrupt is None:
                    raise
                self.call_soon(self._loop.interrupt)

    def _run(self, main: Coroutine[Any, Any, Any]) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                result = runner.run(main)
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._result.set_exception(error)
        else:
            self._result.set_result(result)


class _ForwardingLoop(asyncio.SelectorEventLoop):
    """An event loop outside the main thread, which no signal reaches: whoever waits for it forwards Ctrl-C."""

    interrupt: Callable[[], object] | None = None

    def add_signal_handler(self, sig: int, callback: Callable[[Unpack[Ts]], Any], *args: Unpack[Ts]) -> None:
        if sig != signal.SIGINT:
            super().add_signal_handler(sig, callback, *args)
            return
        self.interrupt = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        if sig != signal.SIGINT:
            return super().remove_signal_handler(sig)
        found, self.interrupt = self.interrupt is not None, None
        return found
