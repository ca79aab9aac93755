"""One thread that keeps indices up to date: it copies attempts first, and reads texts when nobody waits for attempts."""

import os
import queue
import sqlite3
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from antiphon.core.errors import AntiphonError, RecordError
from antiphon.dashboard.index import copy_ledger, read_events, read_texts
from antiphon.dashboard.index.store import identify, index_path, open_empty, open_for_reading, open_index
from antiphon.inspect.token_texts import TokenTexts

FRESH_SECONDS = 2.0  # for which an index counts as up to date
TEXT_SECONDS = 2.0  # for which texts are read before attempts are copied again
FIRST_SECONDS = 0.5  # for which a page waits for the first attempts


@dataclass
class Progress:
    """State of one index, written by the worker and read by pages.

    Attributes:
        attempts: Share of the attempts that is copied.
        texts: Share of the files whose texts are indexed.
        problem: The reason why texts cannot be read; empty if they can.
        failure: The reason why the ledger cannot be read; empty if it can.
        has_events: True once the events are copied.
        updated: Time of the last complete copy, on the monotonic clock.
    """

    attempts: float = 0.0
    texts: float = 0.0
    problem: str = ""
    failure: str = ""
    updated: float = float("-inf")
    has_events: bool = False
    ready: threading.Event = field(default_factory=threading.Event)

    @property
    def is_complete(self) -> bool:
        """True if all attempts are copied."""
        return self.updated > float("-inf")


class IndexWorker:
    """Builds and refreshes the indices of the runs that pages ask for."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._progress: dict[Path, Progress] = {}
        self._asked: queue.Queue[Path | None] = queue.Queue()
        self._waiting: set[Path] = set()
        self._texts: dict[Path, TokenTexts] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="dashboard index", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, after the transaction that it is in."""
        self._asked.put(None)
        self._thread.join(timeout=30)

    def refresh(self, run: Path) -> Progress:
        """Ask for an up-to-date index, wait a moment for the first attempts, and return the state."""
        with self._lock:
            progress = self._progress.setdefault(run, Progress())
            if time.monotonic() - progress.updated > FRESH_SECONDS and run not in self._waiting:
                self._waiting.add(run)
                self._asked.put(run)
        progress.ready.wait(FIRST_SECONDS)
        return progress

    def build(self, run: Path) -> None:
        """Bring the index of a run up to date in this thread, texts included; raise `RecordError` if its ledger is damaged."""
        with self._lock:
            progress = self._progress.setdefault(run, Progress())
        self._update(run, progress)

    def open(self, run: Path) -> sqlite3.Connection:
        """Open the index of a run for queries; an empty one until the first attempts are copied.

        Raises:
            RecordError: The ledger cannot be read, or nobody has asked for the index by `refresh`.
        """
        path = index_path(run, self._cache)
        progress = self._progress.get(run)
        if progress is not None and progress.failure:
            raise RecordError(progress.failure, path=run)
        if progress is None:
            raise RecordError("nobody has asked for the index of this run", path=run)
        return open_for_reading(path) if progress.ready.is_set() else open_empty()

    def _work(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while (run := self._asked.get()) is not None:
            progress = self._progress[run]
            try:
                self._update(run, progress)
            except (AntiphonError, OSError, sqlite3.Error) as error:
                progress.failure = " ".join(str(error).split())[:500]
                progress.updated = time.monotonic()
            with self._lock:
                self._waiting.discard(run)
            progress.ready.set()

    def _update(self, run: Path, progress: Progress) -> None:
        index = open_index(index_path(run, self._cache), identify(run))
        try:

            def report(share: float) -> None:
                progress.attempts = share
                progress.ready.set()

            copy_ledger.copy_attempts(index, run, report)
            progress.attempts, progress.updated, progress.failure = 1.0, time.monotonic(), ""
            progress.ready.set()
            with self._lock:
                self._waiting.discard(run)
            read_events.copy_spans(index, run)
            progress.has_events = True
            self._read_texts(index, run, progress)
        finally:
            index.close()

    def _read_texts(self, index: sqlite3.Connection, run: Path, progress: Progress) -> None:
        until = time.monotonic() + TEXT_SECONDS

        def go_on(share: float) -> bool:
            progress.texts = share
            if self._asked.empty() or time.monotonic() < until:  # pages that ask again and again must not stop it
                return True
            self.refresh_later(run)  # somebody waits for attempts: texts go on after that
            return False

        try:
            texts = self.token_texts(run)
        except AntiphonError as error:
            progress.problem = " ".join(str(error).split())[:300]
            return
        progress.problem = ""
        read_texts.index_texts(index, run, texts, go_on)
        if self._asked.empty():
            progress.texts = 1.0

    def refresh_later(self, run: Path) -> None:
        """Put a run at the end of the queue."""
        with self._lock:
            if run not in self._waiting:
                self._waiting.add(run)
                self._asked.put(run)

    def token_texts(self, run: Path) -> TokenTexts:
        """Return the tokenizer of a run; raise `RecordError` if it has none."""
        if run not in self._texts:
            while len(self._texts) >= 4:  # a large vocabulary takes 100 MB
                self._texts.pop(next(iter(self._texts)))
            self._texts[run] = TokenTexts.open(run)
        return self._texts[run]
