"""Separate states of Python's and numpy's global random generators for environments that share a process."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

SEEDS = 2**32  # seeds that numpy's legacy generator takes


class GlobalRandom:
    """The state of the global random generators of Python and numpy that one environment sees.

    Some libraries draw from the global generators while many environments take turns in one process, each in a thread. One
    that hangs inside the context keeps the others of its process waiting.
    """

    _lock = threading.RLock()

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate(), np.random.RandomState(seed % SEEDS).get_state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Draw from this environment's state in the body."""
        with self._lock:
            before = random.getstate(), np.random.get_state()
            self._set(self._state)
            try:
                yield
            finally:
                self._state = random.getstate(), np.random.get_state()
                self._set(before)

    @staticmethod
    def _set(state: Any) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])
