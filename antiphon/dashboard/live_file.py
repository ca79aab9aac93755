"""Read `live.json`, in which a run that goes on says what it does. Every value is checked: anybody may have written it."""

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.core.errors import AntiphonError
from antiphon.record import safe_files

NAME = "live.json"
MOST_BYTES = 1 << 20
MOST_ENGINES = 4_096
MOST_ROWS = 2_048  # of any other list
WINDOW = 20.0  # seconds over which the speed is measured
GROUP_STATES = ("running", "complete", "taken", "stale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine, or a rollout worker with its engines.

    Attributes:
        name: Its name.
        running: Requests that it runs.
        capacity: Requests that it decodes at once; 0 if that is not known.
        version: Version of its weights.
        behind: Versions that it lacks.
        state: ready, loading, asleep or leaving.
    """

    name: str
    running: int
    capacity: int
    version: int
    behind: int
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGroup:
    """A group alive: its number, age in versions, state and finished attempts."""

    group: int
    age: int
    state: str
    finished: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Waits of one kind: who waits, their name, what they wait for, how many, and the oldest with its deadline in seconds."""

    owner: str
    name: str
    on: str
    count: int
    seconds: float
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment of the last minutes: seconds ago, tokens a second, requests that ran and queued, and the learner's wait."""

    ago: float
    rate: float
    running: int
    queue: int
    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """The state of a run when it last wrote it.

    Attributes:
        quiet: Seconds since it wrote the state.
        interval: Seconds between two states.
        second: Time of the state, on the lineage's clock.
        lineage: The lineage.
        step: The last step that began.
        version: The newest version.
        capacity: Groups that may be alive.
        max_age: Greatest age at which a group may be trained on.
        groups_per_step: Groups that a step takes.
        group_size: Attempts that complete a group.
        engines: The engines.
        queue: Requests that no engine has yet.
        graders: Processes that grade.
        has_environments: True if a task has an environment.
        groups: The oldest groups alive.
        alive: Number of groups alive.
        attempts: Number of running attempts.
        waits: Who waits for whom.
        history: The last three minutes.
        rate: Sampled tokens a second, over the last 20 seconds; None if it is not known yet.
    """

    quiet: float
    interval: float
    second: float
    lineage: int
    step: int
    version: int
    capacity: int
    max_age: int
    groups_per_step: int
    group_size: int
    engines: list[Engine]
    queue: int
    graders: int
    has_environments: bool
    groups: list[LiveGroup]
    alive: int
    attempts: int
    waits: list[Wait]
    history: list[Moment] = field(default_factory=list)
    rate: float | None = None

    @property
    def is_quiet(self) -> bool:
        """True if a run that goes on should have written a newer state."""
        return self.quiet > 4 * self.interval + 2


def read_live_state(run: Path) -> LiveState | None:
    """Return the last state of a run; None if it wrote none, or none that can be read."""
    try:
        if not (run / NAME).is_file():
            return None
        found = safe_files.read_json(run, NAME, MOST_BYTES)
        with safe_files.convert_read_errors(run / NAME):
            return _parse(found, max(time.time() - (run / NAME).stat().st_mtime, 0.0))
    except (AntiphonError, OSError):
        return None


def _parse(found: Any, quiet: float) -> LiveState:
    version = _count(found["version"])
    history = _parse_history(found["history"][-MOST_ROWS:])
    return LiveState(
        quiet=quiet,
        interval=min(max(_number(found["interval"]), 0.1), 60.0),
        second=_number(found["second"]),
        lineage=_count(found["lineage"]),
        step=_count(found["step"]),
        version=version,
        capacity=_count(found["capacity"]),
        max_age=_count(found["max_age"]),
        groups_per_step=_count(found["groups_per_step"]),
        group_size=_count(found["group_size"]),
        engines=[
            Engine(
                name=str(each["name"])[:60],
                running=_count(each["running"]),
                capacity=_count(each["capacity"]),
                version=_count(each["version"]),
                behind=max(version - _count(each["version"]), 0),
                state=str(each["state"])[:20],
            )
            for each in found["engines"][:MOST_ENGINES]
        ],
        queue=_count(found["queue"]),
        graders=_count(found["graders"]),
        has_environments=bool(found["has_environments"]),
        groups=[
            LiveGroup(group=_count(group), age=_count(age), state=_choose_state(state), finished=_count(finished))
            for group, age, state, finished in found["groups"][:MOST_ROWS]
        ],
        alive=_count(found["groups_alive"]),
        attempts=_count(found["attempts"]),
        waits=[
            Wait(
                owner=str(each["owner"])[:100],
                name=str(each["name"])[:40],
                on=str(each["on"])[:200],
                count=_count(each["count"]),
                seconds=_number(each["seconds"]),
                deadline=_number(each["deadline"]),
            )
            for each in found["waits"][:MOST_ROWS]
        ],
        history=history,
        rate=history[-1].rate if len(history) > 1 else None,
    )


def _parse_history(rows: list[Any]) -> list[Moment]:
    seconds, tokens = [_number(row[0]) for row in rows], [_number(row[1]) for row in rows]
    found, first = [], 0
    for place, row in enumerate(rows):
        while seconds[place] - seconds[first] > WINDOW:
            first += 1
        passed = seconds[place] - seconds[first]
        rate = max(tokens[place] - tokens[first], 0.0) / passed if passed > 0 else 0.0
        ago = seconds[-1] - seconds[place]
        found.append(Moment(ago=ago, rate=rate, running=_count(row[2]), queue=_count(row[3]), learner=str(row[4])[:40]))
    return found


def _choose_state(state: Any) -> str:
    return state if state in GROUP_STATES else "running"


def _count(value: Any) -> int:
    return min(max(int(_number(value)), 0), 1 << 53)


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{json.dumps(value)} is no finite number")
    return number
