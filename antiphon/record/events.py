"""What happened in a run, in order: one JSON object a line, `t` its second on the run's clock, `event` its kind.

Kinds and what they carry (`attempt` is group.sibling.try, `request` is attempt/turn):

    admit    group, prompt                      a group has a slot
    attempt  attempt, status                    every change of an attempt: running first, a terminal status last
    place    request, engine                    a request goes to an engine
    served   request, engine, finish, tokens    it is back, with so many tokens, of these
             versions [oldest, newest]          versions
    load     engine, version                    an engine samples from a version
    join     engine, version                    the pool has an engine more
    lost, retired  engine                       the pool has an engine less
    grow     engines, asked                     the pool wants so many engines from now on, for so many requests
    take     groups                             a step begins with these groups
    publish  version                            it is done

Of the engines of a judge only those that come and go are noted, with `pool`, the judge's name.

`to_trace` turns them into a picture: https://ui.perfetto.dev opens the file.
"""

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

RARE = frozenset({"join", "lost", "retired", "grow", "fault"})
KEPT = 20  # events, for whoever wants to know what happened last


class Events:
    """Writes events to `sink`; without one, only the last few are kept."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0, sink: TextIO | None = None) -> None:
        self._clock = clock
        self._sink = sink
        self.engine_numbers: Iterator[int] = itertools.count()  # of engines, in the order of their coming
        self._last: deque[tuple[float, str, dict[str, Any]]] = deque(maxlen=KEPT)
        self.on_rare: Callable[[str, dict[str, Any]], None] = lambda event, what: (
            None
        )  # hears of what is worth keeping always

    @property
    def enabled(self) -> bool:
        """Whether anybody listens; asked where it costs something to say what happens."""
        return self._sink is not None

    def add(self, event: str, **what: Any) -> None:
        """Note an event that happens now."""
        now = self._clock()
        self._last.append((now, event, what))
        if event in RARE:
            self.on_rare(event, what)
        if self._sink is not None:
            self._sink.write(_line(now, event, what) + "\n")

    def for_pool(self, pool: str) -> "Events":
        """What notes the rare events of another pool than the policy's among these, with its name."""
        return _Aside(self, pool)

    def now(self) -> float:
        """The second on the run's clock."""
        return self._clock()

    def format_recent(self) -> str:
        """The last events, one a line."""
        return "\n".join(_line(*event) for event in self._last) or "none"


class _Aside(Events):
    """Rare events of one pool, among those of the run."""

    def __init__(self, run: Events, pool: str) -> None:
        super().__init__(run.now)
        self.engine_numbers = run.engine_numbers  # an engine's is its own in the whole run
        self._run = run
        self._pool = pool

    def add(self, event: str, **what: Any) -> None:
        """See `Events.add`."""
        if event in RARE:
            self._run.add(event, pool=self._pool, **what)


def _line(now: float, event: str, what: dict[str, Any]) -> str:
    return json.dumps({"t": now, "event": event, **what}, separators=(",", ":"))


def to_trace(lines: Iterable[str]) -> dict[str, Any]:
    """Events as a trace in Chrome's format: steps of the learner, requests on each engine, attempts, and what is alive."""
    trace: list[dict[str, Any]] = []
    began: dict[str, tuple[float, dict[str, Any]]] = {}
    alive = 0

    def span(name: str, track: str, since: float, until: float, key: str, **what: Any) -> None:
        common = {"name": name, "cat": track, "id": key, "pid": track, "tid": track}
        trace.append({**common, "ph": "b", "ts": since * 1e6, "args": what})
        trace.append({**common, "ph": "e", "ts": until * 1e6})

    for line in lines:
        what = json.loads(line)
        t, event = what.pop("t"), what.pop("event")
        match event:
            case "take":
                began["step"] = (t, what)
            case "publish":
                since, args = began.pop("step", (t, {}))
                span(f"step {what['version']}", "learner", since, t, f"step {what['version']}", **args)
            case "place":
                began[what["request"]] = (t, what)
            case "served":
                since, _ = began.pop(what["request"], (t, {}))
                span(what["request"], f"engine {what['engine']}", since, t, what["request"], **what)
            case "attempt":
                alive += {"running": 1}.get(what["status"], 0)
                key = f"attempt {what['attempt']}"
                if what["status"] == "running":
                    began[key] = (t, what)
                elif key in began:
                    since, _ = began.pop(key)
                    alive -= 1
                    span(what["attempt"], "attempts", since, t, key, **what)
                trace.append(
                    {"name": "running attempts", "ph": "C", "pid": "attempts", "ts": t * 1e6, "args": {"n": alive}}
                )
            case _:
                track = f"engine {what['engine']}" if "engine" in what else "events"
                trace.append(
                    {"name": event, "ph": "i", "s": "p", "pid": track, "tid": track, "ts": t * 1e6, "args": what}
                )
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def write_trace(events: Path, trace: Path) -> None:
    """Make the picture of a file of events."""
    with events.open(encoding="utf-8") as lines:
        trace.write_text(json.dumps(to_trace(lines)), encoding="utf-8")
