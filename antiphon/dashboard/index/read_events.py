"""Copy what lasted from a run's `events.jsonl` into its index: requests on engines, training steps, weight loads."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from antiphon.record import safe_files

MOST_LINE = 1 << 16  # bytes
MOST_SPANS = 4_000_000
BATCH = 5_000
MOST_LANES = 512
Span = tuple[str, str, str, float, float]  # lane, kind, label, start, stop


def copy_spans(index: sqlite3.Connection, run: Path) -> int:
    """Copy the spans that ended since the last time, and return their number; none without `record.events`."""
    path = run / "events.jsonl"
    if not path.exists():
        return 0
    path, state = safe_files.resolve_file(run, path.name), _State.load(index)
    (have,) = index.execute("SELECT count(*) FROM spans").fetchone()
    total = 0
    with safe_files.convert_read_errors(path), path.open("rb") as file:
        if path.stat().st_size < state.offset:
            state = _State()
            index.execute("DELETE FROM spans")
        file.seek(state.offset)
        while have + total < MOST_SPANS:
            spans = list(_read_batch(file, state))
            state.lanes = sorted({*state.lanes, *(span[0] for span in spans)})[:MOST_LANES]
            state.longest = max([state.longest, *(stop - start for _, _, _, start, stop in spans)])
            if not state.moved:
                break
            index.executemany("INSERT INTO spans (lane, kind, label, start, stop) VALUES (?, ?, ?, ?, ?)", spans)
            state.save(index)
            index.commit()
            total += len(spans)
    return total


def read_extent(index: sqlite3.Connection) -> tuple[float, list[str]]:
    """Return the seconds of the longest span in an index, and the names of all lanes."""
    state = _State.load(index)
    return state.longest, state.lanes


class _State:
    """Place in the file, and what began before it and has not ended."""

    def __init__(self) -> None:
        self.offset = 0
        self.moved = False
        self.placed: dict[str, list[Any]] = {}  # request -> [time, engine]
        self.taken: list[Any] = []  # [time]
        self.longest = 0.0  # seconds of a span
        self.lanes: list[str] = []

    @classmethod
    def load(cls, index: sqlite3.Connection) -> "_State":
        state = cls()
        row = index.execute("SELECT value FROM meta WHERE key = 'events'").fetchone()
        if row is not None:
            state.__dict__.update(json.loads(row[0]))
        return state

    def save(self, index: sqlite3.Connection) -> None:
        index.execute("INSERT OR REPLACE INTO meta VALUES ('events', ?)", (json.dumps(self.__dict__),))


def _read_batch(file: Any, state: _State) -> Iterator[Span]:
    state.moved = False
    for _ in range(BATCH):
        line = file.readline(MOST_LINE)
        if not line.endswith(b"\n"):
            return
        state.offset += len(line)
        state.moved = True
        try:
            fields = json.loads(line)
            yield from _make_spans(state, fields.get("event"), float(fields["t"]), fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # a damaged line


def _make_spans(state: _State, event: Any, now: float, fields: dict[str, Any]) -> Iterator[Span]:
    engine = f"engine {fields.get('engine')}"[:40]
    match event:
        case "place":
            state.placed[_attempt(fields["request"])] = [now, engine, str(fields["request"])[:80]]
        case "served":
            if found := state.placed.pop(_attempt(fields["request"]), None):
                yield found[1], "request", found[2], found[0], now
        case "attempt":
            if found := state.placed.pop(str(fields["attempt"]), None):
                yield found[1], "aborted", found[2], found[0], now
        case "take":
            state.taken = [now]
        case "publish":
            start = state.taken.pop() if state.taken else now
            yield "learner", "step", f"version {int(fields['version'])}", start, now
        case "load" | "join" | "lost" | "retired" | "sleep" | "wake" | "fault":
            label = f"{event} {fields['version']}" if "version" in fields else str(event)
            yield engine if "engine" in fields else "events", str(event), label[:80], now, now
        case _:
            return


def _attempt(request: Any) -> str:
    return str(request).partition("/")[0]
