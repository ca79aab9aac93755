"""Tell pages when a run has written something, by server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from antiphon.dashboard.cards import is_locked
from antiphon.dashboard.errors import RequestError
from antiphon.dashboard.site import Site

INTERVAL = 1.0  # seconds between looks at a run's files
GAP = 5  # looks between two events: a page costs the server more than a look
BEAT = 15  # looks between signs of life
MOST_STREAMS = 64
WATCHED = ("metrics.jsonl", "summary.json", "ledger.db-wal", "ledger.db", "live.json")
Sign = list[tuple[int, int]]


class TooManyStreamsError(RequestError):
    """More pages watch runs than the server lets."""

    status = 503


class Changes:
    """The streams of changes. A look at a run is a few calls of `stat`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._streams = 0
        self._closed = asyncio.Event()

    def watch(self, name: str) -> AsyncIterator[str]:
        """Return the stream of a run's changes; each event names the files that have changed.

        Raises:
            NotFoundError: There is no such run.
            TooManyStreamsError: More than 64 pages watch already.
        """
        run = self._site.folder.find(name)
        if self._streams >= MOST_STREAMS:
            raise TooManyStreamsError(
                f"{MOST_STREAMS} pages watch runs already; close some, or reload this one by hand"
            )
        return self._stream(run)

    def close(self) -> None:
        """End all streams; for the thread of the event loop."""
        self._closed.set()

    async def _stream(self, run: Path) -> AsyncIterator[str]:
        self._streams += 1
        try:
            before = await asyncio.to_thread(_look, run)
            yield "retry: 5000\n\n"
            quiet = GAP
            while not await self._wait():
                now = await asyncio.to_thread(_look, run)
                if now != before and quiet >= GAP:
                    changed = [
                        name for name, one, other in zip((*WATCHED, "state"), before, now, strict=True) if one != other
                    ]
                    before, quiet = now, 0
                    yield f"data: {json.dumps({'changed': changed})}\n\n"
                elif (quiet := quiet + 1) % BEAT == 0:
                    yield ": still here\n\n"
        finally:
            self._streams -= 1

    async def _wait(self) -> bool:
        """Return False when it is time for another look, and True if the streams are to end."""
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._closed.wait(), INTERVAL)
        return False


def _look(run: Path) -> Sign:
    found: Sign = []
    for name in WATCHED:
        try:
            stat = (run / name).stat()
            found.append((stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append((-1, 0))
    return [*found, (int(bool(is_locked(run))), 0)]
