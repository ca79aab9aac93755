"""The page of a run's timeline: what engines and the learner did when, for any interval."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from antiphon.dashboard.cards import RunCard, require_attempts
from antiphon.dashboard.errors import RequestError
from antiphon.dashboard.index.read_events import read_extent
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site
from antiphon.record import safe_files
from antiphon.record.safe_ledger import open_ledger
from antiphon.record.timeline import union_length

CELLS = 240  # of a lane
MOST_ROWS = 8  # of spans above each other in a lane; a lane with more shows its load
MOST_DRAWN = 3_000  # spans that are drawn one by one
NEAR_END = 1_000  # attempts at either end of an interval
MOST_SPANS = 10_000  # that are read; of more, every second one and so on
MOST_LANES = 64
MOST_ATTEMPTS = 10_000  # whose number at a time is counted; of more, every second one and so on
RawSpan = tuple[str, str, float, float]  # kind, label, begin, end
BUSY = ("request", "aborted", "step")
SLOW = 1.5  # times the median of the other engines


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that lasted: its kind, label, begin and end in seconds, and its row in the lane."""

    kind: str
    label: str
    start: float
    stop: float
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Work of one engine or of the learner over time.

    Attributes:
        name: Its name.
        busy: Share of the interval in which it did something; None if not all spans are read.
        spans: What it did, if that can be drawn one by one.
        rows: Rows of spans.
        load: Else the number of requests at places evenly spaced in the interval.
        requests: Number of requests.
        seconds: Median duration of a request.
        is_slow: True if that is much longer than on the other engines.
    """

    name: str
    busy: float | None
    spans: list[Span]
    rows: int
    load: list[float]
    requests: int = 0
    seconds: float | None = None
    is_slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePage:
    """The timeline of a run in an interval.

    Attributes:
        card: The run.
        source: `events` if the run recorded them, else `ledger`, which has steps and attempts alone.
        lineage: The lineage whose clock it is.
        lineages: All lineages.
        first: Begin of the record, in seconds on the clock.
        last: End of the record.
        start: Begin of the interval.
        stop: End of the interval.
        lanes: The lanes.
        running: Number of running attempts at places evenly spaced in the interval.
        reading: True while events are read into the index.
        trace: True if the run has a trace for Perfetto.
    """

    card: RunCard
    source: str
    lineage: int
    lineages: list[int]
    first: float
    last: float
    start: float
    stop: float
    lanes: list[Lane]
    running: list[float]
    reading: bool
    trace: bool


def query_timeline(site: Site, params: Params) -> TimelinePage:
    """Return what happened between `start` and `stop`, in seconds on the clock of the lineage `lineage`."""
    run = site.folder.find(params.name)
    require_attempts(site.read_card(params.name))
    progress = site.index.refresh(run)
    with closing(site.index.open(run)) as index:
        with closing(open_ledger(run, check_pages=False)) as ledger, safe_files.convert_read_errors(run / "ledger.db"):
            lineages = [row[0] for row in ledger.execute("SELECT lineage FROM lineages ORDER BY lineage LIMIT 500")]
            lineage = params.integer("lineage", lineages[-1] if lineages else 0) or 0
            steps = _read_steps(ledger, lineage)
        has_spans = index.execute("SELECT 1 FROM spans LIMIT 1").fetchone() is not None
        first, last = _find_bounds(index, lineage, steps, has_spans)
        start, stop = params.number("start", first), params.number("stop", last)
        start, stop = first if start is None else start, last if stop is None else stop
        if stop <= start:
            raise RequestError(f"stop: {stop:g} is not after start, which is {start:g}")
        lanes = _read_lanes(index, start, stop) if has_spans else []
        if not any(lane.name == "learner" and lane.busy is not None for lane in lanes):  # of many spans some are read
            learner = [("step", f"step {step}", begin, end) for step, begin, end in steps]
            others = [lane for lane in lanes if lane.name != "learner"]
            lanes = [_make_lane("learner", learner, start, stop), *others]
        running = _count_running(index, lineage, start, stop)
    return TimelinePage(
        card=site.read_card(params.name),
        source="events" if has_spans else "ledger",
        lineage=lineage,
        lineages=lineages,
        first=first,
        last=last,
        start=start,
        stop=stop,
        lanes=lanes[:MOST_LANES],
        running=running,
        reading=(run / "events.jsonl").is_file() and not progress.has_events,
        trace=(run / "trace.json").is_file(),
    )


def _read_steps(ledger: sqlite3.Connection, lineage: int) -> list[tuple[int, float, float]]:
    """Return number, begin and end of each step of a lineage that was published."""
    query = "SELECT step, taken, published FROM steps WHERE lineage = ? AND published IS NOT NULL ORDER BY step"
    return [(row[0], row[1], row[2]) for row in ledger.execute(query, (lineage,))]


def _find_bounds(
    index: sqlite3.Connection, lineage: int, steps: list[tuple[int, float, float]], has_spans: bool
) -> tuple[float, float]:
    begins = [steps[0][1]] if steps else []
    ends = [steps[-1][2]] if steps else []
    # One extreme a query: only then an index leads to it at once.
    query = "SELECT (SELECT min(begun) FROM attempts WHERE lineage = ?1), (SELECT max(begun) FROM attempts WHERE lineage = ?1)"
    queries: list[Any] = [index.execute(query, (lineage,)).fetchone()]
    if has_spans:
        longest, _ = read_extent(index)
        query = "SELECT (SELECT min(start) FROM spans), max(stop) FROM spans WHERE start >= (SELECT max(start) FROM spans) - ?"
        queries.append(index.execute(query, (longest,)).fetchone())
    begins += [each[0] for each in queries if each[0] is not None]
    ends += [each[1] for each in queries if each[1] is not None]
    first, last = min(begins, default=0.0), max(ends, default=1.0)
    return (first, last) if last > first else (first, first + 1.0)


def _read_lanes(index: sqlite3.Connection, start: float, stop: float) -> list[Lane]:
    """Return the lanes of an interval."""
    where = "start < ? AND start >= ? AND stop >= ?"
    longest, names = read_extent(index)
    inside: tuple[float, ...] = (stop, start - longest, start)
    query = f"SELECT count(*), min(number), max(number) FROM spans WHERE {where}"
    count, lowest, highest = index.execute(query, inside).fetchone()
    stride = -(-count // MOST_SPANS) or 1
    query = f"SELECT lane, kind, label, start, stop FROM spans WHERE {where} ORDER BY start"
    if stride > 1:  # look single rows up, and leave the others unread
        numbers = "WITH RECURSIVE n (i) AS (SELECT ? UNION ALL SELECT i + ? FROM n WHERE i < ?)"
        query = f"{numbers} SELECT lane, kind, label, start, stop FROM n CROSS JOIN spans ON number = i WHERE {where}"
        inside = (lowest, stride, highest, *inside)
    lanes: dict[str, list[RawSpan]] = {name: [] for name in names}
    for lane, *span in index.execute(query, inside):
        lanes.setdefault(lane, []).append((span[0], span[1], span[2], span[3]))
    found = [_make_lane(name, lanes[name], start, stop, stride) for name in sorted(lanes, key=_rank_lane)]
    return [replace(lane, is_slow=_is_slow(lane, found)) for lane in found]


def _is_slow(lane: Lane, lanes: list[Lane]) -> bool:
    others = [each.seconds for each in lanes if each is not lane and each.seconds is not None]
    return lane.seconds is not None and bool(others) and lane.seconds > SLOW * float(np.median(others))


def _rank_lane(name: str) -> tuple[bool, int, str]:
    """Return the place of a lane: the learner, then engines by number, then other events."""
    digits = name.rpartition(" ")[2]
    return (name == "events", int(digits) if digits.isdigit() else -1, name)


def _make_lane(name: str, spans: list[RawSpan], start: float, stop: float, stride: int = 1) -> Lane:
    inside = [span for span in spans if span[3] >= start and span[2] <= stop]
    busy = union_length((max(begin, start), min(end, stop)) for kind, _, begin, end in inside if kind in BUSY)
    drawn, rows = _stack(inside) if stride == 1 and len(inside) <= MOST_DRAWN else ([], 0)
    is_drawn = 0 < rows <= MOST_ROWS
    seconds = [end - begin for kind, _, begin, end in inside if kind == "request"]
    return Lane(
        name=name,
        busy=min(busy / (stop - start), 1.0) if stride == 1 else None,
        spans=drawn if is_drawn else [span for span in drawn if span.kind not in BUSY][:MOST_DRAWN],
        rows=rows if is_drawn else 1,
        load=[] if is_drawn else _count_load([span for span in inside if span[0] in BUSY], start, stop, stride),
        requests=len(seconds) * stride,
        seconds=float(np.median(seconds)) if seconds else None,
    )


def _stack(spans: list[RawSpan]) -> tuple[list[Span], int]:
    """Put spans that overlap into different rows, and return the number of rows."""
    ends: list[float] = []
    found = []
    for kind, label, start, stop in spans:
        row = next((place for place, end in enumerate(ends) if end <= start), len(ends))
        if kind not in BUSY:
            row = 0
        elif row == len(ends):
            ends.append(stop)
        else:
            ends[row] = stop
        found.append(Span(kind=kind, label=label, start=start, stop=stop, row=row))
    return found, max(len(ends), 1)


def _count_load(spans: list[RawSpan], start: float, stop: float, stride: int = 1) -> list[float]:
    """Return the number of spans at the middle of each cell of the interval."""
    if not spans:
        return []
    places = start + (np.arange(CELLS) + 0.5) * (stop - start) / CELLS
    begun = np.searchsorted(np.sort([span[2] for span in spans]), places, "right")
    ended = np.searchsorted(np.sort([span[3] for span in spans]), places, "right")
    load: list[float] = ((begun - ended) * float(stride)).tolist()
    return load


def _count_running(index: sqlite3.Connection, lineage: int, start: float, stop: float) -> list[float]:
    """Return the number of running attempts at the middle of each cell of the interval."""
    longest = index.execute("SELECT value FROM meta WHERE key = 'longest'").fetchone()
    where = "lineage = ? AND begun > ? AND begun < ? AND seconds IS NOT NULL"
    inside: tuple[float, ...] = (lineage, start - float(longest[0] if longest else 0.0), stop)
    (count,) = index.execute(f"SELECT count(*) FROM attempts WHERE {where}", inside).fetchone()
    stride = -(-count // MOST_ATTEMPTS) or 1
    # Rows are numbered by their groups, and so about in the order of their begin.
    near = (f"SELECT row FROM attempts WHERE {where} ORDER BY begun {way} LIMIT {NEAR_END}" for way in ("ASC", "DESC"))
    query = f"SELECT min(row), max(row) FROM (SELECT * FROM ({') UNION ALL SELECT * FROM ('.join(near)}))"
    lowest, highest = index.execute(query, inside * 2).fetchone()
    query = f"SELECT begun, begun + seconds FROM attempts WHERE {where}"
    if stride > 1:  # look single rows up, and leave the others unread
        numbers = "WITH RECURSIVE n (i) AS (SELECT ? UNION ALL SELECT i + ? FROM n WHERE i < ?)"
        query = f"{numbers} SELECT begun, begun + seconds FROM n CROSS JOIN attempts ON row = i WHERE {where}"
        inside = (lowest, stride, highest, *inside)
    rows = index.execute(query, inside)
    return _count_load([("request", "", begin, end) for begin, end in rows], start, stop, stride)
