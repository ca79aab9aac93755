"""Events of a run, in order: one JSON object a line, with `t` in seconds on the run's clock and its kind `event`.

`EVENTS` lists the kinds.

Of a judge's engines only rare events are recorded, with the judge's name as `pool`.

`to_trace` converts them to a trace that https://ui.perfetto.dev opens.
"""

import itertools
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

# Kind: fields and meaning. An `attempt` is group.sibling.try, a `request` attempt/turn.
EVENTS: Mapping[str, tuple[str, str]] = {
    "admit": ("group prompt", "a group is admitted"),
    "attempt": ("attempt status", "an attempt changes its status, first to running"),
    "place": ("request engine prompt", "a request goes to an engine, with its number of prompt tokens"),
    "served": (
        "request engine finish tokens versions",
        "an engine returns it, with its number of tokens and the oldest and newest version that sampled them",
    ),
    "load": ("engine version", "an engine has loaded a version"),
    "sleep": ("engine", "an engine releases its device to the learner"),
    "wake": ("engine", "an engine takes its device again"),
    "join": ("engine version", "an engine joins the pool"),
    "lost": ("engine", "an engine has died or hangs, and leaves the pool"),
    "retired": ("engine", "an engine leaves the pool, which has become smaller"),
    "grow": ("engines asked", "the pool is resized to this number of engines, for `asked` requests"),
    "role": ("role method seconds", "a call of a role of the user's own has returned"),
    "take": ("groups", "a step begins with these groups"),
    "update": ("version", "a version is published to the engines"),
    "publish": ("version", "the step is done"),
    "fault": ("point", "a simulation injects a fault"),
    "evaluate": ("step version", "an evaluation begins after this step, at this version; 0 is before the first step"),
    "evaluated": (
        "step first last accuracy",
        "it has ended, with the oldest and newest version that its tokens may come from, and its accuracy",
    ),
    "phase": ("", "a probe of the planner begins its next phase"),
    "end": ("error", "the run ends, by itself or by an error"),
}
RARE = frozenset({"join", "lost", "retired", "grow", "fault", "evaluate", "evaluated", "end"})
Export = Callable[[float, str, Mapping[str, Any]], None]  # receives the seconds, the kind and the fields of each event
RECENT = 20  # events that are kept in memory, for error messages


class Events:
    """Writes events to `sink` and gives them to `export`; without both, keeps only the last few."""

    def __init__(
        self, clock: Callable[[], float] = lambda: 0.0, sink: TextIO | None = None, export: Export | None = None
    ) -> None:
        self._clock = clock
        self._sink = sink
        self._export = export
        self.engine_numbers: Iterator[int] = itertools.count()  # of engines, in the order in which they join
        self._last: deque[tuple[float, str, dict[str, Any]]] = deque(maxlen=RECENT)
        # Called with each rare event.
        self.on_rare: Callable[[str, dict[str, Any]], None] = lambda event, fields: None

    @property
    def enabled(self) -> bool:
        """True if events are written or exported; checked where an event is costly to make."""
        return self._sink is not None or self._export is not None

    def add(self, event: str, **fields: Any) -> None:
        """Record an event that happens now."""
        now = self._clock()
        self._last.append((now, event, fields))
        if event in RARE:
            self.on_rare(event, fields)
        if self._sink is not None:
            self._sink.write(_format_event(now, event, fields) + "\n")
        if self._export is not None:
            self._export(now, event, fields)

    def for_pool(self, pool: str) -> "Events":
        """Return events of a judge's pool: rare ones are recorded here with the pool's name, others are dropped."""
        return _PoolEvents(self, pool)

    def now(self) -> float:
        """Return the seconds on the run's clock."""
        return self._clock()

    def format_recent(self) -> str:
        """Return the last events, one a line."""
        return "\n".join(_format_event(*event) for event in self._last) or "none"


class _PoolEvents(Events):
    """Rare events of one pool, recorded among those of the run."""

    def __init__(self, run: Events, pool: str) -> None:
        super().__init__(run.now)
        self.engine_numbers = run.engine_numbers  # unique in the whole run
        self._run = run
        self._pool = pool

    def add(self, event: str, **fields: Any) -> None:
        """Record an event if it is rare."""
        if event in RARE:
            self._run.add(event, pool=self._pool, **fields)


def _format_event(now: float, event: str, fields: dict[str, Any]) -> str:
    return json.dumps({"t": now, "event": event, **fields}, separators=(",", ":"))


class Span(NamedTuple):
    """Something of a run that took time: a step, a request, an attempt, or a call of a role."""

    name: str
    track: str  # where it happened: learner, attempts, an engine or a role
    since: float  # on the run's clock, in seconds
    until: float
    key: str  # of an attempt, unique in a life of a run; a request is placed again if its engine dies
    parent: str  # key of the attempt of a request; empty for all else, such as the requests of an evaluation
    fields: Mapping[str, Any]  # of its events


ATTEMPTS = "attempts"  # the track of attempts
SPANNING = frozenset({"take", "publish", "place", "served", "role", "attempt"})  # events that begin or end a span


class SpanBuilder:
    """Joins the events that begin something with those that end it."""

    def __init__(self) -> None:
        self._began: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._requests = defaultdict[str, set[str]](set)  # of each attempt, those that are placed

    def add(self, t: float, event: str, fields: Mapping[str, Any]) -> Span | None:
        """Return the span that an event ends, if it ends one."""
        match event:
            case "take":
                self._began["step"] = t, fields
            case "place":
                self._began[fields["request"]] = t, fields
                self._requests[_attempt_of(fields)].add(fields["request"])
            case "publish":
                since, began = self._began.pop("step", (t, {}))
                name = f"step {fields['version']}"
                return Span(name, "learner", since, t, name, "", began)
            case "served":
                return self._end_request(t, fields)
            case "role":
                role, method = f"role {fields['role']}", fields["method"]
                return Span(method, role, t - fields["seconds"], t, role, "", fields)
            case "attempt" if fields["status"] == "running":
                self._began[f"attempt {fields['attempt']}"] = t, fields
            case "attempt":
                return self._end_attempt(t, fields)
        return None

    def _end_request(self, t: float, fields: Mapping[str, Any]) -> Span:
        request, attempt = fields["request"], _attempt_of(fields)
        since, _ = self._began.pop(request, (t, {}))
        self._requests[attempt].discard(request)
        if not self._requests[attempt]:
            del self._requests[attempt]
        parent = f"attempt {attempt}" if f"attempt {attempt}" in self._began else ""
        return Span(request, f"engine {fields['engine']}", since, t, request, parent, fields)

    def _end_attempt(self, t: float, fields: Mapping[str, Any]) -> Span | None:
        name, key = fields["attempt"], f"attempt {fields['attempt']}"
        if key not in self._began:  # it has ended before, and is trained on now
            return None
        since, _ = self._began.pop(key)
        for request in self._requests.pop(name, ()):  # cancelled ones are never served
            self._began.pop(request, None)
        return Span(name, ATTEMPTS, since, t, key, "", fields)


def _attempt_of(fields: Mapping[str, Any]) -> str:
    """Return the attempt of a request."""
    attempt: str = fields["request"].partition("/")[0]
    return attempt


def to_trace(lines: Iterable[str]) -> dict[str, Any]:
    """Convert events to Chrome's trace format: steps, requests on each engine, attempts, and the number of running ones.

    Lines that a crash or a full disk damaged are left out.
    """
    trace: list[dict[str, Any]] = []
    spans, running_count = SpanBuilder(), 0
    for fields in _parse(lines):
        t, event = fields.pop("t"), fields.pop("event")
        if span := spans.add(t, event, fields):
            common = {"name": span.name, "cat": span.track, "id": f"{span.key} {len(trace)}"}
            common |= {"pid": span.track, "tid": span.track}
            trace.append({**common, "ph": "b", "ts": span.since * 1e6, "args": span.fields})
            trace.append({**common, "ph": "e", "ts": span.until * 1e6})
            running_count -= event == "attempt"
        if event == "attempt":
            running_count += fields["status"] == "running"
            trace.append(_count("running attempts", "attempts", t, running_count))
        elif event not in SPANNING:
            trace.append(_instant(event, t, fields))
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def _parse(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of lines; those that a crash or a full disk damaged are left out."""
    for line in lines:
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def _count(name: str, track: str, t: float, n: int) -> dict[str, Any]:
    return {"name": name, "ph": "C", "pid": track, "ts": t * 1e6, "args": {"n": n}}


def _instant(event: str, t: float, fields: dict[str, Any]) -> dict[str, Any]:
    track = f"engine {fields['engine']}" if "engine" in fields else "events"
    return {"name": event, "ph": "i", "s": "p", "pid": track, "tid": track, "ts": t * 1e6, "args": fields}


def write_trace(events: Path, trace: Path) -> None:
    """Write the trace of a file of events."""
    with events.open(encoding="utf-8", errors="replace") as lines:
        trace.write_text(json.dumps(to_trace(lines)), encoding="utf-8")
