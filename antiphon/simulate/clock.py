"""Virtual time for asyncio: the clock stands still while anything can run, and jumps to the next timer when nothing can.

An hour of timers takes as long as the Python between them. Nothing sleeps, and nothing of the outside world takes part:
no threads, no sockets. So one program has one execution, the same every time.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from antiphon.core.errors import StallError, StateError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

ROUNDS = 100_000


class _Jump(selectors.BaseSelector):
    """Where an event loop waits for the outside world, this moves the clock instead."""

    def __init__(self) -> None:
        self.now = 0.0
        self._rounds = 0  # of the loop, since the clock last moved
        self._registered: dict[int, selectors.SelectorKey] = {}  # the loop's own pipe, which nobody writes to

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StallError("nothing can happen any more: no task is ready and no timer is set")
        self._rounds = self._rounds + 1 if timeout <= 0 else 0
        if self._rounds > ROUNDS:
            raise StallError(f"{ROUNDS} rounds of the loop and no time has passed: something goes in circles")
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
        self._jump = _Jump()
        super().__init__(self._jump)
        self._clock_resolution = 1e-9  # seconds; more than the rounding of `now + (when - now)` for half a year

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jump.now

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Refused, as asyncio does where it cannot: signals arrive through a pipe that is not read here."""
        raise RuntimeError("no signals in virtual time")

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Refused: a thread's work takes real time, which there is none of here."""
        raise StateError(f"{getattr(func, '__qualname__', func)} wants a thread; in virtual time there are none")


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time; `StallError` if everything waits and no timer will end it."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
