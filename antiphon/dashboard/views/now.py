"""The page of a run now: its loop as a picture, who holds up whom, the freshness window, and what happened last."""

import itertools
import json
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.dashboard.cards import RunCard, require_attempts
from antiphon.dashboard.curves import MetricTable
from antiphon.dashboard.hold_ups import (
    LEARNER,
    HoldUp,
    WaitLine,
    count_waits,
    describe_learner,
    find_hold_ups,
    list_waits,
)
from antiphon.dashboard.live_file import LiveState, Moment, read_live_state
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site
from antiphon.dashboard.views.run import estimate_remaining
from antiphon.record import safe_files
from antiphon.record.safe_ledger import open_ledger

MOST_EVENTS = 12
MOST_STEPS = 8
RARE_EVENTS = {
    "join": "engine {engine} joined",
    "lost": "engine {engine} was lost",
    "retired": "engine {engine} was retired",
    "grow": "the pool is resized to {engines} engines",
    "fault": "a fault was injected: {point}",
    "branch": "the run began at a checkpoint of another",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened: seconds ago (None: not known), its kind, and a sentence."""

    ago: float | None
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """The learner at a moment: if it works or waits, for how long, and the share of the last minutes in which it worked."""

    activity: str
    is_working: bool
    seconds: float
    busy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A time in which the learner worked or waited: its begin and end, in seconds ago."""

    start: float
    stop: float
    is_working: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NowPage:
    """A run now.

    Attributes:
        card: Its line in the list of runs.
        pulse: `live`, `stalled` (its process gives no sign of life), `starting`, `ended` (it does not run), or `unknown` (it
            recorded no state).
        phase: `steps` or `warm start`.
        state: Its last state; None if there is none.
        learner: The learner.
        work: When the learner worked and when it waited, in the last minutes.
        in_environments: Running attempts that no engine or grader has; None if no task has an environment.
        grading: Attempts that are graded.
        hold_ups: Who holds up whom, the worst first.
        waits: The wait-for graph.
        ready: Groups that the next step may take.
        remaining: Seconds until its last step, if it runs.
        reward: Mean score of the last step.
        events: What happened last, the newest first.
    """

    card: RunCard
    pulse: str
    phase: str
    state: LiveState | None
    learner: Learner | None
    work: list[Stretch]
    in_environments: int | None
    grading: int
    hold_ups: list[HoldUp]
    waits: list[WaitLine]
    ready: int
    remaining: float | None
    reward: float | None
    events: list[Event]


def query_now(site: Site, params: Params) -> NowPage:
    """Return what a run does now, as it last recorded it."""
    run, card = site.folder.find(params.name), site.read_card(params.name)
    require_attempts(card)
    metrics = site.read_metrics(params.name)
    table = metrics.training if len(metrics.training) else metrics.supervised
    state = read_live_state(run)
    history = _read_history(run)
    pulse = _find_pulse(card, state, history.lineage)
    outside = _count_outside(state) if state is not None else None
    has_groups = state is not None and (state.alive > 0 or len(metrics.training) > 0)
    return NowPage(
        card=card,
        pulse=pulse,
        phase="steps" if has_groups or not len(metrics.supervised) else "warm start",
        state=state,
        learner=_describe_learner(state) if state is not None else None,
        work=_list_work(state) if state is not None else [],
        in_environments=outside,
        grading=count_waits(state, "grade") if state is not None else 0,
        hold_ups=find_hold_ups(state, outside or 0) if state is not None and pulse == "live" else [],
        waits=list_waits(state, outside or 0) if state is not None else [],
        ready=sum(group.state == "complete" for group in state.groups) if state is not None else 0,
        remaining=estimate_remaining(card, table),
        reward=table.last("reward/mean"),
        events=_list_events(history, state, metrics.training),
    )


def _find_pulse(card: RunCard, state: LiveState | None, lineage: int) -> str:
    if card.state != "running":
        return "ended" if state is not None else "unknown"
    if state is None or state.lineage < lineage:
        return "starting"
    return "stalled" if state.is_quiet else "live"


def _describe_learner(state: LiveState) -> Learner:
    activity, is_working, seconds = describe_learner(state)
    working = [_is_working(moment) for moment in state.history]
    busy = sum(working) / len(working) if working else None
    return Learner(activity=activity, is_working=is_working, seconds=seconds, busy=busy)


def _is_working(moment: Moment) -> bool:
    return moment.learner not in LEARNER or LEARNER[moment.learner][1]


def _list_work(state: LiveState) -> list[Stretch]:
    found: list[Stretch] = []
    for is_working, part in itertools.groupby(itertools.pairwise(state.history), key=lambda pair: _is_working(pair[0])):
        pairs = list(part)
        found.append(Stretch(start=pairs[0][0].ago, stop=pairs[-1][1].ago, is_working=is_working))
    return found


def _count_outside(state: LiveState) -> int | None:
    """Return how many running attempts are with an environment; None if no task has one."""
    if not state.has_environments:
        return None
    elsewhere = sum(engine.running for engine in state.engines) + state.queue
    return max(state.attempts - elsewhere - count_waits(state, "grade") - count_waits(state, "siblings"), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _History:
    """The last lineage of a ledger, the step that it continues from, its last steps and its last rare events."""

    lineage: int = 0
    cut: int | None = None
    steps: list[tuple[int, int, float, float]] = field(default_factory=list)  # step, version, begin, end
    events: list[tuple[float, str, str]] = field(default_factory=list)  # second, kind, detail


def _read_history(run: Path) -> _History:
    if not (run / "ledger.db").exists():
        return _History()
    with closing(open_ledger(run, check_pages=False)) as ledger, safe_files.convert_read_errors(run / "ledger.db"):
        query = "SELECT lineage, iif(parent IS NULL, NULL, cut) FROM lineages ORDER BY lineage DESC LIMIT 1"
        lineage, cut = ledger.execute(query).fetchone() or (0, None)
        steps = "SELECT step, version, taken, published FROM steps WHERE lineage = ? AND published IS NOT NULL"
        events = "SELECT second, kind, detail FROM events WHERE lineage = ? ORDER BY number DESC LIMIT ?"
        return _History(
            lineage=lineage,
            cut=cut,
            steps=ledger.execute(f"{steps} ORDER BY step DESC LIMIT ?", (lineage, MOST_STEPS)).fetchall(),
            events=ledger.execute(events, (lineage, MOST_EVENTS)).fetchall(),
        )


def _list_events(history: _History, state: LiveState | None, table: MetricTable) -> list[Event]:
    """Return what happened last in a lineage: steps, rare events of the record, and its begin."""
    now = state.second + state.quiet if state is not None and state.lineage == history.lineage else None
    rewards = dict(zip(table.steps[-MOST_STEPS:], table.column("reward/mean")[-MOST_STEPS:].tolist(), strict=True))
    found = [
        (end, "step", _describe_step(step, version, end - begin, rewards.get(step)))
        for step, version, begin, end in history.steps
    ]
    found += [(second, kind[:20], _describe_event(kind, detail)) for second, kind, detail in history.events]
    found.sort(key=lambda event: -event[0])
    events = [
        Event(ago=None if now is None else max(now - second, 0.0), kind=kind, text=text)
        for second, kind, text in found[:MOST_EVENTS]
    ]
    if history.cut is not None:
        text = f"resumed after step {history.cut} as lineage {history.lineage}"
        events.append(Event(ago=None, kind="resume", text=text))
    return events


def _describe_step(step: int, version: int, seconds: float, reward: float | None) -> str:
    score = f", reward {reward:.3f}" if reward is not None and reward == reward else ""
    return f"step {step} published version {version} after {seconds:.1f} s{score}"


def _describe_event(kind: str, detail: str) -> str:
    try:
        fields: Any = json.loads(detail[:10_000])
        if kind == "end":
            return f"the run ended by an error: {str(fields['error'])[:300]}" if fields["error"] else "the run ended"
        return RARE_EVENTS[kind].format(**{key: str(value)[:100] for key, value in fields.items()})
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return kind[:40]
