"""The events of one lineage that drive a replay, in the order in which the scheduler saw them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from antiphon.core.errors import AntiphonError, RecordError
from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    Failure,
    PolicyVersion,
    Score,
    Trajectory,
    TrajectoryMeta,
)
from antiphon.record import safe_files, trajectories
from antiphon.record.reader import AttemptRow, LineageRow, RunReader


class ReplayMismatchError(AntiphonError):
    """A replay differs from what the run recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """An attempt ended."""

    attempt: AttemptId
    trajectory: Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegin:
    """A step took its groups."""

    step: int
    groups: tuple[int, ...]
    batch: str | None  # digest of what it trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A step published its version."""

    version: int
    digest: int | None  # of the weights, if engines got them
    to_engines: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLineage:
    """One lineage as the ledger has it."""

    row: LineageRow
    version: int  # at its beginning
    events: Sequence[Arrival | StepBegin | Publication]

    @property
    def number(self) -> int:
        """The number of the lineage."""
        return self.row.lineage

    @property
    def step(self) -> int:
        """The last step before it began."""
        return self.row.cut


def read_lineages(reader: RunReader) -> Iterator[RecordedLineage]:
    """Read the lineages of a run, the first one first.

    Raises:
        RecordError: The run has no lineage, or its record is damaged.
        ReplayMismatchError: A recorded trajectory is not the one that the ledger names.
    """
    rows = reader.list_lineages()
    if not rows:
        path = _ledger(reader)
        raise RecordError(f"{path} has no lineage: there is nothing to replay", path=path)
    for row in rows:
        with safe_files.convert_read_errors(_ledger(reader)):
            numbered = [*_read_arrivals(reader, row.lineage), *_read_steps(reader, row.lineage)]
        events = [event for _, event in sorted(numbered, key=lambda entry: entry[0])]
        # The first lineage may begin after a warm start, which has published versions of its own.
        version = row.version if row.parent is not None else reader.find_first_version(row.lineage) or 0
        yield RecordedLineage(row=row, version=version, events=events)


def _ledger(reader: RunReader) -> Path:
    return reader.directory / "ledger.db"


def _read_arrivals(reader: RunReader, lineage: int) -> Iterator[tuple[int, Arrival]]:
    """Yield how attempts ended, with sequence numbers. Reused trajectories are left out: the replay reuses them itself."""
    for row in reader.iterate_arrivals(lineage):
        assert row.arrival is not None  # the reader's condition
        if row.file is None:
            yield row.arrival, Arrival(attempt=row.id, trajectory=_make_failed(row))
            continue
        trajectory = reader.read_trajectories(row.file).get(row.id)
        if trajectory is None or trajectories.digest(trajectory) != row.digest:
            raise ReplayMismatchError(
                f"attempt {row.name}: its trajectory in rollouts/{row.file} is not the one that was recorded"
            )
        yield row.arrival, Arrival(attempt=row.id, trajectory=trajectory)


def _make_failed(row: AttemptRow) -> Trajectory:
    """Make the trajectory of an attempt that failed without one."""
    source, _, message = (row.failure or "").partition(": ")
    version = PolicyVersion(row.lineage, row.started)
    meta = TrajectoryMeta(
        id=row.id,
        prompt_id=row.prompt.id,
        task=row.prompt.task,
        started=version,
        newest=version,
        status=AttemptStatus.FAILED,
        score=Score.ungraded(message),
        failure=Failure(source=cast(Any, source), message=message),
    )
    return Trajectory(meta=meta, payload=())


def _read_steps(reader: RunReader, lineage: int) -> Iterator[tuple[int, StepBegin | Publication]]:
    """Yield the begins and the publications of steps, with sequence numbers."""
    for step in reader.list_steps(lineage):
        groups = tuple(reader.list_groups(lineage, step.step))
        yield step.began, StepBegin(step=step.step, groups=groups, batch=step.batch)
        if step.released is not None and step.version is not None:
            yield (
                step.released,
                Publication(version=step.version, digest=step.weights, to_engines=step.to_engines),
            )
