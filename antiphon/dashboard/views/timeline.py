"""The page of a run's timeline: what engines and the learner did when, for any interval."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from antiphon.dashboard.cards import RunCard
from antiphon.dashboard.errors import RequestError
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site
from antiphon.record import safe_files
from antiphon.record.safe_ledger import open_ledger

CELLS = 480  # of a lane in which spans are too short to be drawn one by one
MOST_SPANS = 3_000  # that are drawn one by one
MOST_LANES = 64
MOST_ATTEMPTS = 200_000  # whose concurrency is counted
LONGEST_SPAN = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that lasted: its kind, label, begin and end in seconds, and the share of the cell that is busy."""

    kind: str
    label: str
    start: float
    stop: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What one engine or the learner did: its spans, and the share of the interval in which it was busy."""

    name: str
    busy: float
    spans: list[Span]


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
        drawn: True if spans are drawn one by one; False if each cell shows how much of it is busy.
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
    drawn: bool
    trace: bool


def query_timeline(site: Site, params: Params) -> TimelinePage:
    """Return what happened between `start` and `stop`, in seconds on the clock of the lineage `lineage`."""
    run = site.folder.find(params.name)
    site.index.refresh(run)
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
        lanes, drawn = _read_lanes(index, start, stop) if has_spans else ([], True)
        if not any(lane.name == "learner" for lane in lanes):
            lanes.append(_make_learner(steps, start, stop))
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
        drawn=drawn,
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
    row = index.execute(
        "SELECT min(begun), max(begun + coalesce(seconds, 0)) FROM attempts WHERE lineage = ?", (lineage,)
    ).fetchone()
    queries: list[Any] = [row]
    if has_spans:
        queries.append(index.execute("SELECT min(start), max(stop) FROM spans").fetchone())
    begins += [each[0] for each in queries if each[0] is not None]
    ends += [each[1] for each in queries if each[1] is not None]
    first, last = min(begins, default=0.0), max(ends, default=1.0)
    return (first, last) if last > first else (first, first + 1.0)


def _read_lanes(index: sqlite3.Connection, start: float, stop: float) -> tuple[list[Lane], bool]:
    """Return the lanes of an interval, and True if spans are drawn one by one."""
    where = "start < ? AND start >= ? AND stop >= ?"
    inside = (stop, start - LONGEST_SPAN, start)
    query = f"SELECT lane, kind, label, start, stop FROM spans WHERE {where} ORDER BY start LIMIT {MOST_SPANS + 1}"
    rows = index.execute(query, inside).fetchall()
    lanes: dict[str, list[Span]] = {}
    if len(rows) <= MOST_SPANS:
        for lane, kind, label, begin, end in rows:
            lanes.setdefault(lane, []).append(Span(kind=kind, label=label, start=begin, stop=end, share=1.0))
        return [_make_lane(name, spans, start, stop) for name, spans in sorted(lanes.items(), key=_by_lane)], True
    width = (stop - start) / CELLS
    query = (
        "SELECT lane, CAST((max(start, :start) - :start) / :width AS INTEGER) AS cell, count(*) AS spans,"
        f" sum(min(stop, :stop) - max(start, :start)) AS busy FROM spans WHERE {where.replace('?', '{}')}"
        " AND kind IN ('request', 'aborted', 'step') GROUP BY lane, cell"
    ).format(":stop", ":floor", ":start")
    values = {"start": start, "stop": stop, "width": width, "floor": start - LONGEST_SPAN}
    for lane, cell, count, busy in index.execute(query, values):
        begin = start + cell * width
        label = f"{count:,} begin here"
        share = min((busy or 0.0) / width, 1.0)
        lanes.setdefault(lane, []).append(Span(kind="cell", label=label, start=begin, stop=begin + width, share=share))
    return [_make_lane(name, spans, start, stop) for name, spans in sorted(lanes.items(), key=_by_lane)], False


def _by_lane(item: tuple[str, Any]) -> tuple[int, int, str]:
    name = item[0]
    digits = name.rpartition(" ")[2]
    return (name == "events", int(digits) if digits.isdigit() else -1, name)


def _make_lane(name: str, spans: list[Span], start: float, stop: float) -> Lane:
    covered, end = 0.0, start
    for span in spans:
        begin, until = max(span.start, end), min(span.stop, stop)
        if until > begin:
            covered += (until - begin) * span.share
            end = until
    return Lane(name=name, busy=covered / (stop - start), spans=spans)


def _make_learner(steps: list[tuple[int, float, float]], start: float, stop: float) -> Lane:
    inside = [step for step in steps if step[2] >= start and step[1] <= stop]
    stride = -(-len(inside) // MOST_SPANS) or 1
    spans = [
        Span(kind="step", label=f"step {step}", start=begin, stop=end, share=1.0)
        for step, begin, end in inside[::stride]
    ]
    lane = _make_lane("learner", spans, start, stop)
    return Lane(name=lane.name, busy=min(lane.busy * stride, 1.0), spans=spans)


def _count_running(index: sqlite3.Connection, lineage: int, start: float, stop: float) -> list[float]:
    """Return the mean number of running attempts in cells of the interval, of up to 200,000 attempts."""
    cells = CELLS // 2
    rows = index.execute(
        "SELECT begun, begun + seconds FROM attempts WHERE lineage = ? AND seconds IS NOT NULL AND begun < ?"
        f" AND begun + seconds > ? LIMIT {MOST_ATTEMPTS}",
        (lineage, stop, start),
    ).fetchall()
    if not rows:
        return []
    spans = np.array([tuple(row) for row in rows], np.float64)
    edges = np.linspace(start, stop, cells + 1)
    begun = np.searchsorted(np.sort(spans[:, 0]), edges)
    ended = np.searchsorted(np.sort(spans[:, 1]), edges)
    counts: list[float] = (begun - ended)[:-1].astype(float).tolist()
    return counts
