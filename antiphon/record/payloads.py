"""Payloads that do not travel with their metas: whoever makes trajectories keeps them in files, whoever trains on them fetches
them from there. What lies between has `PayloadReference`s."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from antiphon.core.errors import RecordError
from antiphon.core.failpoints import hit
from antiphon.core.types import AttemptId, Group, PayloadReference, Trajectory
from antiphon.record import trajectories
from antiphon.record.run_dir import atomic_write, make_write_error


class PayloadWriter:
    """The files in which one process keeps trajectories: what ends while one is written goes into the next."""

    def __init__(self, rollouts: Path, name: str, lineage: int) -> None:
        """`name` is nobody else's in `rollouts`, the folder that all processes of the run see."""
        self._rollouts = rollouts
        self._lineage = lineage
        self._names = (f"{name}-{number:06d}.parquet" for number in itertools.count())
        self._waiting: list[Trajectory] = []  # for the next file
        self._next: asyncio.Task[str] | None = None
        self._turn = asyncio.Lock()

    async def keep(self, trajectory: Trajectory) -> Trajectory:
        """The same, by reference; when this returns, its payload is durable. `RecordError` if nothing can be written."""
        if not trajectory.segments:
            return trajectory
        if not self._waiting:
            self._next = asyncio.create_task(self._write(), name="rollouts")
        assert self._next is not None
        self._waiting.append(trajectory)
        file = await asyncio.shield(self._next)
        return replace(trajectory, payload=PayloadReference(file, trajectory.meta.id, trajectories.digest(trajectory)))

    async def _write(self) -> str:
        async with self._turn:
            kept, self._waiting = self._waiting, []
            name = next(self._names)
            await asyncio.to_thread(_write_whole, self._rollouts / name, self._lineage, kept)
        return name

    async def close(self) -> None:
        """Return when nothing is written any more."""
        if self._next is not None:
            await asyncio.wait({self._next})


def _write_whole(path: Path, lineage: int, kept: Sequence[Trajectory]) -> None:
    """As `trajectories.write`, but the file is durable, or it is not there. `RecordError` if it cannot be written."""
    try:
        with atomic_write(path) as file:
            trajectories.write(file, lineage, kept)
            hit("rollouts.write")
    except OSError as error:
        raise make_write_error(path, error) from error
    hit("rollouts.written")


class PayloadReader:
    """Fetches what is referred to, from the run's `rollouts`; the files of the last time are at hand."""

    def __init__(self, rollouts: Path) -> None:
        self._rollouts = rollouts
        self._files: dict[str, Mapping[AttemptId, Trajectory]] = {}

    def fetch(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with their segments. `RecordError` if one does not lie there as it was recorded."""
        known, self._files = self._files, {}
        return [
            replace(group, trajectories=tuple(self._fetch(each, known) for each in group.trajectories))
            for group in groups
        ]

    def _fetch(self, trajectory: Trajectory, known: Mapping[str, Mapping[AttemptId, Trajectory]]) -> Trajectory:
        lies = trajectory.payload
        if not isinstance(lies, PayloadReference):
            return trajectory
        path = self._rollouts / lies.file
        if lies.file not in self._files:
            try:
                self._files[lies.file] = known.get(lies.file) or trajectories.read(path)
            except RecordError as error:
                raise RecordError(
                    f"{path} cannot be read where the learner is: {error}; all nodes must see record.directory"
                ) from error
        found = self._files[lies.file].get(lies.attempt)
        if found is None or trajectories.digest(found) != lies.digest:
            raise RecordError(f"{path}: the trajectory of attempt {lies.attempt} is not the one that was recorded")
        return replace(trajectory, payload=found.payload)
