"""First differences between runs, found in the background as `antiphon diff` finds them, and kept until a ledger changes."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.core.errors import AntiphonError
from antiphon.dashboard.audits import sign_ledger
from antiphon.inspect.diff import diff

MOST_TEXT = 2_000  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        state: `unasked`, `running`, `found`, `none` or `unreadable`.
        text: The difference, or the reason why it cannot be told.
    """

    state: str
    text: str = ""


class Differences:
    """Compares pairs of runs, one at a time."""

    def __init__(self) -> None:
        self._results: dict[tuple[Path, Path], tuple[Any, Difference]] = {}
        self._running: set[tuple[Path, Path]] = set()
        self._lock = threading.Lock()
        self._one = threading.Semaphore(1)

    def read(self, one: Path, other: Path, *, ask: bool) -> Difference:
        """Return the first difference between two runs as they are now; `ask` begins to look for it."""
        pair, signature = (one, other), (sign_ledger(one), sign_ledger(other))
        with self._lock:
            known = self._results.get(pair)
            if known is not None and known[0] == signature:
                return known[1]
            if pair not in self._running:
                if not ask:
                    return Difference(state="unasked")
                self._running.add(pair)
                threading.Thread(target=self._compare, args=(pair, signature), daemon=True, name="difference").start()
        return Difference(state="running")

    def _compare(self, pair: tuple[Path, Path], signature: Any) -> None:
        try:
            with self._one:
                found = diff(*pair)
            result = Difference(state="found" if found else "none", text=(found or "")[:MOST_TEXT])
        except AntiphonError as error:
            result = Difference(state="unreadable", text=str(error)[:MOST_TEXT])
        with self._lock:
            self._results[pair] = (signature, result)
            self._running.discard(pair)
