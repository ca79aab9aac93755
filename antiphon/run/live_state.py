"""The state of a run that goes on, in `live.json`, for those who watch it from another process.

The file is replaced every two seconds: engines with their load and version, groups alive, and who waits for whom. It is of no
use to a resume, and so it is not forced to disk. A run that cannot write it goes on without.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from antiphon.core.deadlines import Wait
from antiphon.core.types import AttemptStatus
from antiphon.rollout.admission import Admission
from antiphon.run.loop import Run

INTERVAL = 2.0  # seconds between two states
HISTORY = 90  # states whose numbers are kept: three minutes
MOST_GROUPS = 1_024  # that are listed one by one, the oldest first


@asynccontextmanager
async def keep_live_state(run: Run) -> AsyncIterator[None]:
    """Write the state of a run every two seconds, for as long as the context is open."""
    writing = asyncio.create_task(LiveState(run).keep_writing(), name="live state")
    try:
        yield
    finally:
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing


class LiveState:
    """Describes a run and writes what it describes."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._history: deque[tuple[float, int, int, int, str]] = deque(maxlen=HISTORY)

    async def keep_writing(self) -> None:
        """Replace the file again and again, until cancelled."""
        while True:
            text = json.dumps(self.describe(), separators=(",", ":"))
            with suppress(OSError):  # a full disk: the ledger says so where it matters
                await asyncio.to_thread(self._write, text)
            await asyncio.sleep(INTERVAL)

    def describe(self) -> dict[str, Any]:
        """Return the state as JSON takes it; `docs/record.md` describes it."""
        parts, scheduler = self._run.parts, self._run.scheduler
        ledger, rollout = parts.record.ledger, parts.config.rollout
        pool, waits = parts.rollouts.describe_load(), parts.deadlines.open()
        now = ledger.events.now()
        learner = next((wait.name for wait in reversed(waits) if wait.owner == "learner"), "")
        busy = sum(engine.running for engine in pool.engines)
        self._history.append((round(now, 3), parts.rollouts.generated_tokens, busy, pool.waiting, learner))
        return {
            "second": now,
            "interval": INTERVAL,
            "lineage": ledger.lineage,
            "step": ledger.step,
            "version": parts.weights.version.n,
            "capacity": rollout.capacity,
            "max_age": rollout.max_age,
            "groups_per_step": rollout.groups_per_step,
            "group_size": rollout.group_size,
            "engines": [engine._asdict() for engine in pool.engines],
            "queue": pool.waiting,
            "graders": parts.config.grading.workers,
            "has_environments": any(task.environment for task in parts.config.tasks),
            "waits": count_waits(waits, now),
            "history": list(self._history),
            **describe_window(scheduler.admission if scheduler is not None else None),
        }

    def _write(self, text: str) -> None:
        path = self._run.parts.record.directory.live
        draft = path.with_name(f".{path.name}")
        draft.write_text(text, encoding="ascii")
        draft.replace(path)


def describe_window(admission: Admission | None) -> dict[str, Any]:
    """Return the groups alive, [group, age, state, finished attempts] each, and the number of running attempts."""
    if admission is None:
        return {"groups": [], "groups_alive": 0, "attempts": 0}
    listed: list[list[Any]] = []
    running = 0
    for group in admission.live_groups():
        running += list(group.attempts.values()).count(AttemptStatus.RUNNING)
        if len(listed) < MOST_GROUPS:
            listed.append([group.id, group.age(admission.version), group.state.name.lower(), group.finished])
    return {"groups": listed, "groups_alive": admission.live, "attempts": running}


def count_waits(waits: Iterable[Wait], now: float) -> list[dict[str, Any]]:
    """Return the open waits, those of one kind together: their number, and the seconds and deadline of the oldest."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for wait in waits:  # oldest first
        kind = (wait.owner.partition(" ")[0], wait.name)
        first = {"owner": wait.owner, "name": wait.name, "on": wait.on, "count": 0}
        row = found.setdefault(kind, first | {"seconds": now - wait.since, "deadline": wait.deadline})
        row["count"] += 1
    return list(found.values())
