"""Tell pages when a run has written something, by server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

from antiphon.dashboard.cards import is_locked
from antiphon.dashboard.errors import RequestError
from antiphon.dashboard.site import Site

INTERVAL = 1.0  # seconds between looks at a run's files
GAP = 5  # looks between two events: a page costs the server more than a look
BEAT = 15.0  # seconds between signs of life
MOST_STREAMS = 64
WATCHED = ("metrics.jsonl", "summary.json", "ledger.db-wal", "ledger.db", "live.json")
Sign = list[tuple[int, int]]


class TooManyStreamsError(RequestError):
    """More pages watch runs than the server lets."""

    status = 503


class Changes:
    """The streams of changes. All pages of a run share the looks at its files, each of which is a few calls of `stat`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._pages: dict[Path, set[asyncio.Queue[list[str] | None]]] = {}  # that watch each run
        self._watches: dict[Path, asyncio.Task[None]] = {}
        self._closed = False

    def watch(self, name: str) -> AsyncIterator[str]:
        """Return the stream of a run's changes; each event names the files that have changed.

        Raises:
            NotFoundError: There is no such run.
            TooManyStreamsError: More than 64 pages watch already.
        """
        run = self._site.folder.find(name)
        if sum(map(len, self._pages.values())) >= MOST_STREAMS:
            raise TooManyStreamsError(
                f"{MOST_STREAMS} pages watch runs already; close some, or reload this one by hand"
            )
        return self._stream(run)

    def close(self) -> None:
        """End all streams, and those that begin later; for the thread of the event loop."""
        self._closed = True
        for pages in self._pages.values():
            for page in pages:
                page.put_nowait(None)

    async def _stream(self, run: Path) -> AsyncIterator[str]:
        page: asyncio.Queue[list[str] | None] = asyncio.Queue()
        self._pages.setdefault(run, set()).add(page)
        try:
            before = await asyncio.to_thread(_look, run)
            if run not in self._watches:
                self._watches[run] = asyncio.create_task(self._follow(run, before))
            yield "retry: 5000\n\n"
            while not self._closed:
                try:
                    changed = await asyncio.wait_for(page.get(), BEAT)
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                if changed is not None:
                    yield f"data: {json.dumps({'changed': changed})}\n\n"
        finally:
            self._pages[run].remove(page)
            if not self._pages[run]:
                del self._pages[run]
                if watch := self._watches.pop(run, None):
                    watch.cancel()

    async def _follow(self, run: Path, before: Sign) -> None:
        """Tell all pages of a run what has changed. They ask again at the same time, so that it is read once."""
        quiet = GAP
        while True:
            await asyncio.sleep(INTERVAL)
            now = await asyncio.to_thread(_look, run)
            if now == before or quiet < GAP:
                quiet += 1
                continue
            changed = [name for name, one, other in zip((*WATCHED, "state"), before, now, strict=True) if one != other]
            before, quiet = now, 0
            for page in self._pages[run]:
                page.put_nowait(changed)


def _look(run: Path) -> Sign:
    found: Sign = []
    for name in WATCHED:
        try:
            stat = (run / name).stat()
            found.append((stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append((-1, 0))
    return [*found, (int(bool(is_locked(run))), 0)]
