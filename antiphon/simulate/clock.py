"""Virtual time for asyncio: the clock stands still while any task can run, and jumps to the next timer when none can.

An hour of timers takes as long as the Python between them. There are no sleeps, threads or sockets, so a program runs the same
way every time.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from antiphon.core.errors import StallError, StateError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

ROUNDS = 100_000  # of the loop at one time, after which it is taken to be endless


class _ClockSelector(selectors.BaseSelector):
    """Moves the clock where an event loop would wait for input and output."""

    def __init__(self) -> None:
        self.now = 0.0
        self._rounds = 0  # of the loop, since the clock last moved
        self._registered: dict[int, selectors.SelectorKey] = {}  # the loop's own pipe, which nobody writes to

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StallError("nothing can happen any more: no task is ready and no timer is set")
        self._rounds = self._rounds + 1 if timeout <= 0 else 0
        if self._rounds > ROUNDS:
            raise StallError(f"{ROUNDS} rounds of the loop and no time has passed: tasks wake each other endlessly")
        self.now += max(timeout, 0.0)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._registered[descriptor] = selectors.SelectorKey(fileobj, descriptor, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._registered.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._registered


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` is virtual and begins at 0."""

    def __init__(self) -> None:
        self._clock_selector = _ClockSelector()
        super().__init__(self._clock_selector)
        self._clock_resolution = 1e-9  # seconds; more than the rounding of `now + (when - now)` for half a year

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._clock_selector.now

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Raise `RuntimeError`, as asyncio does without signals: they would arrive through a pipe that is not read here."""
        raise RuntimeError("no signals in virtual time")

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Raise `StateError`: a thread's work takes real time."""
        raise StateError(f"{getattr(func, '__qualname__', func)} needs a thread; in virtual time there are none")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time; raise `StallError` if every task waits and no timer is set."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
