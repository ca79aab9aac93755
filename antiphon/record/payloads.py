"""Payloads that do not travel with their metadata.

Rollout workers write trajectories to files, and the trainer process reads them from there. In between, a trajectory holds a
`PayloadReference`.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from antiphon.core.errors import RecordError
from antiphon.core.failpoints import hit
from antiphon.core.types import AttemptId, Group, PayloadReference, Trajectory
from antiphon.record import image_files, safe_files, trajectories
from antiphon.record.run_dir import atomic_write, make_write_error


class PayloadWriter:
    """Writes the trajectories of one process; those that end while a file is written go into the next file."""

    def __init__(self, rollouts: Path, name: str, lineage: int) -> None:
        """Write to `rollouts`, which all processes of the run see, under names that begin with `name`, which no other uses."""
        self._rollouts = rollouts
        self._lineage = lineage
        self._names = (f"{name}-{number:06d}.parquet" for number in itertools.count())
        self._waiting: list[Trajectory] = []  # for the next file
        self._next: asyncio.Task[str] | None = None
        self._lock = asyncio.Lock()

    async def write(self, trajectory: Trajectory) -> Trajectory:
        """Make a trajectory's payload durable, and return the trajectory with a reference to it."""
        if not trajectory.segments:
            return trajectory
        if not self._waiting:
            self._next = asyncio.create_task(self._write_file(), name="rollouts")
        assert self._next is not None
        self._waiting.append(trajectory)
        file = await asyncio.shield(self._next)
        return replace(trajectory, payload=PayloadReference(file, trajectory.meta.id, trajectories.digest(trajectory)))

    async def _write_file(self) -> str:
        async with self._lock:
            waiting, self._waiting = self._waiting, []
            name = next(self._names)
            await asyncio.to_thread(_write_durably, self._rollouts / name, self._lineage, waiting)
        return name

    async def close(self) -> None:
        """Wait until the last file is written."""
        if self._next is not None:
            await asyncio.wait({self._next})


def _write_durably(path: Path, lineage: int, written: Sequence[Trajectory]) -> None:
    """Write trajectories to a file that is durable or not there; raise `RecordError` if it cannot be written."""
    try:
        image_files.write_images(path.parent, written)
        with atomic_write(path) as file:
            trajectories.write(file, lineage, written)
            hit("rollouts.write")
    except OSError as error:
        raise make_write_error(path, error) from error
    hit("rollouts.written")


class PayloadReader:
    """Reads referenced payloads from the run's `rollouts`; the files of the last call are kept in memory."""

    def __init__(self, rollouts: Path) -> None:
        self._rollouts = rollouts
        self._files: dict[str, Mapping[AttemptId, Trajectory]] = {}

    def fetch(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups with their segments; raise `RecordError` if a payload is not the one that was recorded."""
        known, self._files = self._files, {}
        return [
            replace(group, trajectories=tuple(self._fetch(each, known) for each in group.trajectories))
            for group in groups
        ]

    def _fetch(self, trajectory: Trajectory, known: Mapping[str, Mapping[AttemptId, Trajectory]]) -> Trajectory:
        reference = trajectory.payload
        if not isinstance(reference, PayloadReference):
            return trajectory
        path = self._rollouts / reference.file
        if reference.file not in self._files:
            try:
                file = safe_files.resolve_file(self._rollouts, reference.file)  # a worker names it
                self._files[reference.file] = known.get(reference.file) or trajectories.read(file)
            except RecordError as error:
                raise RecordError(
                    f"{path} cannot be read by the learner: {error}; all nodes must see record.directory", path=path
                ) from error
        found = self._files[reference.file].get(reference.attempt)
        if found is None or trajectories.digest(found) != reference.digest:
            message = f"{path}: the trajectory of attempt {reference.attempt} is not the one that was recorded"
            raise RecordError(message, path=path)
        return replace(trajectory, payload=found.payload)
