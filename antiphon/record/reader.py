"""The one reader of run directories: configuration, ledger rows and trajectories.

Everything that looks at a run goes through `RunReader`, except the audit, which shares nothing with the writer but the schema.
Rows have the same fields whatever version of the schema they were written with. A value that cannot be read raises
`RecordError` that names the file.
"""

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from antiphon.core.types import AttemptId, Credit, Trajectory, TrajectoryMeta
from antiphon.record import safe_files, trajectories
from antiphon.record.safe_ledger import open_ledger


class PromptKey(NamedTuple):
    """The identity of a prompt, stable across resumes."""

    task: str
    id: str
    epoch: int


# An attempt is found by its primary key, which begins with the lineage: lineages are few.
IN_LINEAGE = "lineage IN (SELECT lineage FROM lineages WHERE ? IS NULL OR lineage = ?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageRow:
    """One uninterrupted execution of a run."""

    lineage: int
    parent: int | None
    cut: int  # step of the parent that it continues from
    version: int  # at the cut
    code: str
    state: dict[str, Any] | None  # of scheduler, prompt sources and algorithm at the cut


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """The checkpoint of another run that a run begins at."""

    run: str  # its directory, at that time
    lineage: int  # that wrote the checkpoint
    step: int
    version: int
    digest: str  # of its manifest, which has the digests of its files


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One attempt with its prompt and its group."""

    lineage: int
    id: AttemptId
    prompt: PromptKey
    admitted: int  # version at which its group was admitted
    outcome: str | None  # of its group; None while it is live
    status: str
    started: int  # version
    newest: int | None  # version
    step: int | None  # that trained on it
    score: float | None
    failure: str | None
    arrival: int | None  # sequence number
    tokens: int | None  # sampled
    file: str | None
    digest: int | None
    origin: str | None
    made_by: AttemptId  # that sampled its trajectory: itself, or the one in `origin`

    @property
    def name(self) -> str:
        """The name of the attempt in the whole run, `lineage:group.sibling.try`."""
        return f"{self.lineage}:{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One training step."""

    lineage: int
    step: int
    version: int | None  # that it published
    batch: str | None  # digest
    weights: int | None  # digest of the version
    to_engines: bool  # engines got the version
    began: int  # sequence number
    released: int | None  # sequence number of its publication
    is_undone: bool


class RunReader:
    """Reads one run directory."""

    def __init__(self, directory: Path, db: sqlite3.Connection) -> None:
        """Read through an open connection, which stays the caller's; `open` makes one."""
        self.directory = directory
        self._ledger = directory / "ledger.db"
        self._db = db
        self._files: dict[str, dict[AttemptId, Trajectory]] = {}
        self._metas: dict[str, dict[AttemptId, TrajectoryMeta]] = {}

    @classmethod
    def open(cls, directory: Path, *, check_pages: bool = True) -> Self:
        """Open a run directory that somebody else may have made; close it, or use it in a `with` statement.

        `check_pages` is that of `open_ledger`.
        """
        return cls(directory, open_ledger(directory, check_pages=check_pages))

    def read_config(self) -> dict[str, Any]:
        """Return the run's configuration as plain values."""
        return safe_files.read_config(self.directory)

    def list_lineages(self) -> list[LineageRow]:
        """Return all lineages, the newest last."""
        rows = list(self._query("SELECT lineage, parent, cut, version, code, state FROM lineages ORDER BY lineage"))
        with safe_files.convert_read_errors(self._ledger):
            return [
                LineageRow(**dict(row) | {"state": json.loads(row["state"]) if row["state"] else None}) for row in rows
            ]

    def find_branch_point(self) -> BranchPoint | None:
        """Return the checkpoint of another run that the run begins at; None if it begins at its model."""
        row = next(self._query("SELECT detail FROM events WHERE kind = 'branch' AND lineage = 0"), None)
        with safe_files.convert_read_errors(self._ledger):
            return None if row is None else BranchPoint(**json.loads(row["detail"]))

    def find_first_version(self, lineage: int) -> int | None:
        """Return the oldest version at which a group of a lineage was admitted."""
        (row,) = self._query("SELECT min(version) AS version FROM groups WHERE lineage = ?", lineage)
        version: int | None = row["version"]
        return version

    def find_attempt(self, attempt: AttemptId, lineage: int | None = None) -> AttemptRow | None:
        """Return an attempt of a lineage, by default of the newest one that has it; None if there is none."""
        condition = f"grp = ? AND sibling = ? AND try = ? AND {IN_LINEAGE} ORDER BY lineage DESC LIMIT 1"
        return next(self._attempts(condition, *attempt, lineage, lineage), None)

    def list_siblings(self, row: AttemptRow) -> list[AttemptRow]:
        """Return all attempts of an attempt's group, itself included."""
        return list(self._attempts("lineage = ? AND grp = ? ORDER BY sibling, try", row.lineage, row.id.group))

    def find_reuse(self, row: AttemptRow) -> AttemptRow | None:
        """Return the next attempt that reused the trajectory of an attempt; None if there is none."""
        condition = "origin = ? AND lineage > ? ORDER BY lineage LIMIT 1"
        return next(self._attempts(condition, row.origin or row.name, row.lineage), None)

    def read_credit(self, row: AttemptRow) -> Credit | None:
        """Return what a step made of an attempt that it trained on; None if that was not recorded."""
        if not list(self._query("SELECT 1 FROM sqlite_schema WHERE name = 'credit'")):  # schema version 1
            return None
        query = (
            "SELECT reward, advantage, weight, tokens, signal FROM credit"
            " WHERE lineage = ? AND grp = ? AND sibling = ? AND try = ?"
        )
        found = next(self._query(query, row.lineage, *row.id), None)
        if found is None:
            return None
        fields: dict[str, Any] = {name: math.nan if value is None else value for name, value in dict(found).items()}
        return Credit(row.id, **fields)

    def find_end(self, lineage: int) -> str | None:
        """Return the error that ended a lineage, empty if it ended by itself; None if no end is on record."""
        query = "SELECT coalesce(detail ->> '$.error', '') AS error FROM events WHERE kind = 'end' AND lineage = ?"
        found = next(self._query(query, lineage), None)
        return None if found is None else str(found["error"])

    def read_metrics(self, lineage: int, step: int) -> dict[str, Any]:
        """Return the metrics of a step of a lineage; empty if there are none."""
        return safe_files.read_metrics(self.directory, lineage, step)

    def list_attempts(self, group: int, sibling: int | None = None, lineage: int | None = None) -> Iterator[AttemptRow]:
        """Yield all attempts of a group, or of one sibling, in all lineages or in one."""
        condition = f"grp = ? AND sibling = coalesce(?, sibling) AND {IN_LINEAGE}"
        return self._attempts(f"{condition} ORDER BY lineage, sibling, try", group, sibling, lineage, lineage)

    def iterate_attempts(self, status: str = "") -> Iterator[AttemptRow]:
        """Yield all attempts of all lineages, or those with one status."""
        return self._attempts("(? = '' OR status = ?) ORDER BY lineage, grp, sibling, try", status, status)

    def iterate_recorded(self) -> Iterator[AttemptRow]:
        """Yield the attempts that sampled a trajectory which is on record."""
        return self._attempts("file IS NOT NULL AND origin IS NULL ORDER BY lineage, grp, sibling, try")

    def iterate_arrivals(self, lineage: int) -> Iterator[AttemptRow]:
        """Yield the attempts of a lineage that ran to an end, without those that reused a trajectory."""
        return self._attempts("lineage = ? AND arrival IS NOT NULL AND origin IS NULL ORDER BY arrival", lineage)

    def iterate_scored(self, before_lineage: int, oldest_start: int, newest_token: int) -> Iterator[AttemptRow]:
        """Yield scored attempts of lineages before one, started and ended within a range of versions."""
        condition = (
            "lineage < ? AND started >= ? AND newest <= ? AND file IS NOT NULL AND score IS NOT NULL"
            " ORDER BY lineage, grp, sibling, try"
        )
        return self._attempts(condition, before_lineage, oldest_start, newest_token)

    def iterate_finished(self, step: int | None, status: str, order: str) -> Iterator[AttemptRow]:
        """Yield attempts with a trajectory, of one step and of one status if these are given, in the order of an SQL clause.

        Of a step that was undone and done again, only the attempts of the step that stands are yielded.
        """
        stands = "EXISTS (SELECT 1 FROM steps s WHERE s.lineage = a.lineage AND s.step = a.step AND NOT s.undone)"
        condition = f"file IS NOT NULL AND (? IS NULL OR (a.step = ? AND {stands})) AND (? = '' OR status = ?)"
        return self._attempts(f"{condition} ORDER BY {order}", step, step, status, status)

    def iterate_trained(self) -> Iterator[tuple[StepRow, AttemptRow]]:
        """Yield the attempts that steps which were not undone trained on, by step, prompt and sibling."""
        steps = {(step.lineage, step.step): step for step in self.list_steps() if not step.is_undone}
        for attempt in self._attempts("status = 'trained' ORDER BY step, id, epoch, sibling"):
            step = steps.get((attempt.lineage, attempt.step or 0))
            if step is not None:
                yield step, attempt

    def find_step(self, lineage: int, step: int | None) -> StepRow | None:
        """Return a step of a lineage; None if there is none."""
        return next(iter(self._read_steps("s.lineage = ? AND step = ?", lineage, step)), None)

    def list_steps(self, lineage: int | None = None) -> list[StepRow]:
        """Return the steps of one lineage, or of all, in order."""
        return self._read_steps("s.lineage = coalesce(?, s.lineage)", lineage)

    def _read_steps(self, condition: str, *values: Any) -> list[StepRow]:
        rows = self._query(
            "SELECT s.lineage, step, s.version, batch, digest AS weights, v.version IS NOT NULL AS to_engines,"
            " took AS began, released, undone FROM steps s"
            " LEFT JOIN versions v ON v.lineage = s.lineage AND v.version = s.version"
            f" WHERE {condition} ORDER BY step, s.lineage",
            *values,
        )
        return [_make_step(row) for row in rows]

    def list_groups(self, lineage: int, step: int) -> list[int]:
        """Return the groups that a step trained on."""
        return [
            row["grp"] for row in self._query("SELECT grp FROM groups WHERE lineage = ? AND step = ?", lineage, step)
        ]

    def read_trajectories(self, file: str) -> dict[AttemptId, Trajectory]:
        """Return the trajectories of a file in `rollouts/`; each file is read once."""
        if file not in self._files:
            self._files[file] = trajectories.read(safe_files.resolve_file(self.directory, f"rollouts/{file}"))
        return self._files[file]

    def read_metas(self, file: str) -> dict[AttemptId, TrajectoryMeta]:
        """Return the trajectories of a file in `rollouts/` without their tokens; each file is read once."""
        if file not in self._metas:
            self._metas[file] = trajectories.read_metas(safe_files.resolve_file(self.directory, f"rollouts/{file}"))
        return self._metas[file]

    def close(self) -> None:
        """Close the ledger."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attempts(self, condition: str, *values: Any) -> Iterator[AttemptRow]:
        query = (
            "SELECT lineage, grp, sibling, try, task, id, epoch, g.version AS admitted, outcome, status, started, newest,"
            " a.step AS step, score, failure, arrival, tokens, file, digest, origin"
            " FROM attempts a JOIN groups g USING (lineage, grp) JOIN prompts USING (prompt) WHERE "
        )
        for row in self._query(query + condition, *values):
            with safe_files.convert_read_errors(self._ledger):
                attempt = _make_attempt(row)
            yield attempt

    def _query(self, query: str, *values: Any) -> Iterator[sqlite3.Row]:
        with closing(self._db.cursor()) as cursor:
            cursor.row_factory = sqlite3.Row
            with safe_files.convert_read_errors(self._ledger):
                cursor.execute(query, values)
            while True:
                with safe_files.convert_read_errors(self._ledger):
                    row = cursor.fetchone()
                if row is None:
                    return
                yield row


def _make_attempt(row: sqlite3.Row) -> AttemptRow:
    fields = dict(row)
    attempt = AttemptId(fields.pop("grp"), fields.pop("sibling"), fields.pop("try"))
    prompt = PromptKey(fields.pop("task"), fields.pop("id"), fields.pop("epoch"))
    made_by = AttemptId(*map(int, row["origin"].partition(":")[2].split("."))) if row["origin"] else attempt
    return AttemptRow(id=attempt, prompt=prompt, made_by=made_by, **fields)


def _make_step(row: sqlite3.Row) -> StepRow:
    fields = dict(row)
    undone, to_engines = bool(fields.pop("undone")), bool(fields.pop("to_engines"))
    return StepRow(is_undone=undone, to_engines=to_engines, **fields)
