"""Continue a run after any kind of end, from its newest complete checkpoint and its ledger.

What earlier lineages did after that step is marked undone. Attempts that were live when the process was killed are marked
lost now; a process that an error ends marks them itself. Their prompts are drawn again. A finished trajectory whose tokens
come from versions that are still part of the run is not sampled again: `ReusableRollouts` gives it to the group that draws
its prompt.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from antiphon import __version__
from antiphon.core.errors import RecordError
from antiphon.core.types import AttemptId, PayloadReference, Prompt, Trajectory
from antiphon.record import schema, trajectories
from antiphon.record.checkpoint import newest_checkpoint, read_state, set_aside_newer
from antiphon.record.reader import AttemptRow, PromptKey, RunReader
from antiphon.record.store import LedgerStore


@dataclass(frozen=True, slots=True)
class ReusableRollout:
    """A trajectory that an earlier lineage of the run finished."""

    started: int  # version
    origin: str
    file: str
    _trajectory: Trajectory

    def trajectory(self, attempt: AttemptId) -> Trajectory:
        """Return the trajectory under the id of the attempt that reuses it."""
        return trajectories.with_id(self._trajectory, attempt)


@dataclass(slots=True)
class ReusableRollouts:
    """Trajectories that wait for their prompts to be drawn again."""

    by_prompt: dict[PromptKey, dict[int, ReusableRollout]] = field(default_factory=dict)  # by prompt and sibling

    def exclude_tasks(self, tasks: Collection[str]) -> None:
        """Discard the trajectories of some tasks."""
        self.by_prompt = {key: found for key, found in self.by_prompt.items() if key.task not in tasks}

    def take(self, prompt: Prompt, oldest: int) -> Mapping[int, ReusableRollout]:
        """Remove the trajectories of a prompt, and return those that started at version `oldest` or later, by sibling."""
        found = self.by_prompt.pop(PromptKey(prompt.task, prompt.id, prompt.epoch), {})
        return {sibling: kept for sibling, kept in found.items() if kept.started >= oldest}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """The point at which a run continues."""

    checkpoint: Path
    lineage: int  # that was opened
    state: Mapping[str, Any]  # saved with the checkpoint
    reusable: ReusableRollouts
    lost: int  # attempts of the lineage before that were lost


class Lineages:
    """Resolves version numbers: one number can name several versions, of which later lineages undid all but one."""

    def __init__(self, rows: Mapping[int, tuple[int | None, int]]) -> None:
        """Resolve among lineages; `rows` maps each to its parent and the version at its cut."""
        self._rows = rows

    def find_origin(self, lineage: int, version: int) -> tuple[int, int]:
        """Return the lineage that published the version which `lineage` knows by this number, and the number."""
        parent, cut = self._rows[lineage]
        while parent is not None and version <= cut:
            lineage = parent
            parent, cut = self._rows[lineage]
        return lineage, version

    def is_current(self, lineage: int, version: int, now: int) -> bool:
        """Return True if a version of `lineage` is also a version of the lineage `now`."""
        return self.find_origin(lineage, version) == self.find_origin(now, version)


def open_first_lineage(store: LedgerStore) -> None:
    """Record the first lineage of a run."""
    with store.connection as db:
        db.execute("INSERT INTO lineages VALUES (0, NULL, 0, 0, ?, NULL)", (code_version(),))


def open_next_lineage(
    store: LedgerStore, checkpoints: Path, max_age: int, report: Callable[[str], None], *, refer: bool = False
) -> ResumeState:
    """Record the next lineage of a run, from its newest complete checkpoint.

    Args:
        store: The run's ledger.
        checkpoints: Folder of the run's checkpoints.
        max_age: Age in versions up to which a trajectory may be trained on.
        report: Receives a line for each damaged checkpoint, and for each file of trajectories that cannot be read.
        refer: Leave the payloads of reusable trajectories in their files.

    Raises:
        RecordError: No checkpoint is complete, or the newest is one of supervised fine-tuning alone.
    """
    checkpoint = newest_checkpoint(checkpoints, report)
    set_aside_newer(checkpoint)
    state = read_state(checkpoint)
    require_resumable(checkpoint, state)
    step, version, parent = state["step"], state["version"], state["lineage"]
    with store.connection as db:
        (last,) = db.execute("SELECT max(lineage) FROM lineages").fetchone()
        lineage, live = last + 1, f"status IN {schema.LIVE}"
        # None is live in a lineage that an error ended: its process marked them lost itself.
        killed = db.execute(f"SELECT lineage, count(*) FROM attempts WHERE {live} GROUP BY lineage").fetchall()
        db.executemany("INSERT INTO balance VALUES (?, 'lost', ?)", killed)
        db.execute(f"UPDATE attempts SET status = 'lost' WHERE {live}")
        (lost,) = db.execute("SELECT count(*) FROM attempts WHERE status = 'lost' AND lineage = ?", (last,)).fetchone()
        db.execute("UPDATE groups SET outcome = 'lost' WHERE outcome IS NULL")
        db.execute("UPDATE steps SET undone = 1 WHERE step > ?", (step,))
        kept = json.dumps({name: state.get(name) for name in ("mixture", "scheduler", "controllers")})
        db.execute(
            "INSERT INTO lineages VALUES (?, ?, ?, ?, ?, ?)", (lineage, parent, step, version, code_version(), kept)
        )
    return ResumeState(
        checkpoint=checkpoint,
        lineage=lineage,
        state=state,
        reusable=find_reusable(
            RunReader(store.directory, store.connection), lineage, version, version - max_age, report, refer=refer
        ),
        lost=lost,
    )


def require_resumable(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Raise `RecordError` if a checkpoint, of which this is the state, is one of supervised fine-tuning alone."""
    if "scheduler" not in state:
        raise RecordError(
            f"{checkpoint} is a checkpoint of supervised fine-tuning alone, which cannot be resumed; --overwrite starts anew",
            path=checkpoint,
        )


def find_reusable(
    reader: RunReader,
    lineage: int,
    newest_version: int,
    oldest_start: int,
    report: Callable[[str], None] | None = None,
    *,
    refer: bool = False,
) -> ReusableRollouts:
    """Find the trajectories of earlier lineages that a lineage may still train on.

    Args:
        reader: The run.
        lineage: The lineage that reuses them.
        newest_version: Version at its cut; no token may be newer.
        oldest_start: Version before which no trajectory may have started.
        report: Receives a line for each file that cannot be read, whose trajectories are sampled again; without it, the first
            such file is an error.
        refer: Leave payloads in their files.

    Raises:
        RecordError: A file cannot be read, and there is no `report`.
    """
    lineages = Lineages({row.lineage: (row.parent, row.version) for row in reader.list_lineages()})
    reusable, unreadable = ReusableRollouts(), set[str]()
    for row in reader.iterate_scored(lineage, oldest_start, newest_version):
        assert row.newest is not None and row.file is not None  # the reader's condition
        if row.file in unreadable or not lineages.is_current(row.lineage, row.newest, lineage):
            continue
        try:
            found = _read_recorded(reader, row, row.file, refer)
        except (RecordError, OSError) as error:
            if report is None:
                raise
            # Reuse saves time only: what is lost is sampled again.
            unreadable.add(row.file)
            report(f"rollouts/{row.file} skipped, its trajectories are sampled again: {error}")
            continue
        rollout = ReusableRollout(row.started, row.origin or row.name, row.file, found)
        reusable.by_prompt.setdefault(row.prompt, {}).setdefault(row.id.sibling, rollout)
    return reusable


def _read_recorded(reader: RunReader, row: AttemptRow, file: str, refer: bool) -> Trajectory:
    """Return the recorded trajectory of an attempt, or a reference to it; `RecordError` if its file does not have it."""
    try:
        if refer:
            payload = PayloadReference(file, row.made_by, row.digest or 0)
            return Trajectory(meta=reader.read_metas(file)[row.made_by], payload=payload)
        return reader.read_trajectories(file)[row.made_by]
    except KeyError as error:
        path = reader.directory / "rollouts" / file
        raise RecordError(f"{path} lacks the trajectory of attempt {row.name}", path=path) from error


@cache
def code_version() -> str:
    """Return the version of this package and a digest of its sources."""
    root = Path(__file__).parent.parent
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return f"{__version__}+{digest.hexdigest()}"
