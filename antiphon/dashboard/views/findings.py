"""Findings in a run: alarms, falls of the reward, truncation, lost engines, undone steps; each leads to its samples."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

from antiphon.core.errors import AntiphonError
from antiphon.dashboard.curves import MetricTable, rolling_mean
from antiphon.record import safe_files
from antiphon.record.safe_ledger import open_ledger

MOST_ALARMS, MOST_LOST = 10, 5
LEAST_FALL = 0.1  # of the reward that is worth a line, as a share of its range
NOISE = 3.0  # times the usual change from step to step that a fall must have
MUCH_TRUNCATED = 0.1
AROUND = 30.0  # seconds before and after an event that its link shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that stands out: a sentence, and the page with what it is about (`path` and `query`)."""

    text: str
    path: str
    query: str


def list_findings(run: Path, table: MetricTable, alarms: object) -> list[Finding]:
    """Return what stands out in a run.

    Args:
        run: The run directory.
        table: Metrics of its training steps.
        alarms: The first step of each alarm for reward hacking, by `task: signal`, from the summary.
    """
    found = [*_find_alarms(alarms), *_find_fall(table), *_find_truncation(table)]
    try:
        with closing(open_ledger(run, check_pages=False)) as db, safe_files.convert_read_errors(run / "ledger.db"):
            found += [*_find_dropped(db), *_find_undone(db), *_find_lost_engines(db)]
    except AntiphonError:
        pass  # its own line says that the ledger cannot be read, or that there is none
    return found


def _find_alarms(alarms: object) -> Iterator[Finding]:
    items = list(alarms.items())[:MOST_ALARMS] if isinstance(alarms, dict) else []
    for name, step in items:
        task = str(name).partition(":")[0][:100]
        text = f"The signal of reward hacking “{str(name)[:200]}” rose above its threshold at step {step}"
        yield _lead(text, "/rollouts/", step=step, task=task, sort="best")


def _find_fall(table: MetricTable) -> Iterator[Finding]:
    """Yield the greatest fall of the reward from one step to the next, if it is more than noise."""
    reward = table.column("reward/mean")
    known = np.isfinite(reward)
    values, steps = reward[known], np.array(table.steps)[known]
    if len(values) < 3:
        return
    smooth = rolling_mean(values, max(len(values) // 200, 1))
    changes = np.diff(smooth)
    place, usual = int(changes.argmin()), float(np.median(np.abs(changes)))
    if -changes[place] > max(NOISE * usual, LEAST_FALL * float(values.max() - values.min()), 1e-9):
        step = int(steps[place + 1])
        text = f"Reward fell most at step {step}: from {smooth[place]:.3g} to {smooth[place + 1]:.3g}"
        yield _lead(text, "/rollouts/", step=step, sort="worst")


def _find_truncation(table: MetricTable) -> Iterator[Finding]:
    truncated = np.nan_to_num(table.column("length/truncated"))
    if len(truncated) and truncated.max() > MUCH_TRUNCATED:
        step = table.steps[int(truncated.argmax())]
        text = f"{truncated.max():.0%} of the attempts of step {step} ended at a limit of tokens or turns"
        yield _lead(text, "/rollouts/", step=step, sort="longest")


def _find_dropped(db: sqlite3.Connection) -> Iterator[Finding]:
    counts = dict(db.execute("SELECT status, sum(attempts) FROM balance GROUP BY status"))
    for status, reason in (("failed", "failed"), ("stale", "became too old")):
        if counts.get(status):
            yield _lead(f"{counts[status]:,} attempts {reason}, and were not trained on", "/rollouts/", status=status)


def _find_undone(db: sqlite3.Connection) -> Iterator[Finding]:
    first, last, count = db.execute("SELECT min(step), max(step), count(*) FROM steps WHERE undone").fetchone()
    if count:
        text = (
            f"{count} steps between {first} and {last} were undone: the run was resumed from a checkpoint before them"
        )
        yield _lead(text, "/record/")


def _find_lost_engines(db: sqlite3.Connection) -> Iterator[Finding]:
    query = (
        "SELECT lineage, second, detail ->> '$.engine' FROM events WHERE kind = 'lost'"
        " ORDER BY lineage DESC, second LIMIT ?"
    )
    for lineage, second, engine in db.execute(query, (MOST_LOST,)):
        around = {"start": max(second - AROUND, 0.0), "stop": second + AROUND}
        yield _lead(f"Engine {engine} was lost {second:.1f} s after the start", "/timeline/", lineage=lineage, **around)


def _lead(text: str, path: str, **query: Any) -> Finding:
    return Finding(text=text, path=path, query=urlencode(query, errors="replace"))
