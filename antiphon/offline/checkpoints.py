"""Checkpoints of an offline run: the learner's part, and the step that it is of."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from antiphon.learning.config import CheckpointConfig
from antiphon.learning.learner import WorkerLearner
from antiphon.record.checkpoint import (
    TRAINING_STATE,
    checkpoint_name,
    newest_checkpoint,
    prune_checkpoints,
    publish_checkpoint,
    read_state,
    set_aside_newer,
    staging_dir,
)
from antiphon.record.run_dir import RunDirectory
from antiphon.record.upload import CheckpointUploads

Wait = Callable[[Awaitable[Any], str], Awaitable[Any]]  # for a worker, which may hang; with the name of the wait


class OfflineCheckpoints:
    """Writes the checkpoints of a run, one at a time, while training goes on."""

    def __init__(
        self,
        directory: RunDirectory,
        config: CheckpointConfig,
        learner: WorkerLearner,
        wait: Wait,
        report: Callable[[str], object],
    ) -> None:
        self._directory = directory
        self._config = config
        self._learner = learner
        self._wait = wait
        self._saving: asyncio.Task[None] | None = None
        self._uploads = CheckpointUploads(config.upload, config.timeout, directory, report)

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is written after `step`; that of the last step is written in any case."""
        return bool(self._config.every) and step % self._config.every == 0

    async def save(self, owner: asyncio.TaskGroup, state: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint; return when the previous one is complete and the learner may go on."""
        await self.wait_saved()
        place = self._directory.checkpoints / checkpoint_name(state["step"])
        if place.is_dir():  # the one that the run was resumed from
            return
        aside = staging_dir(place)
        written = await self._wait(self._learner.save(aside), "save")

        async def finish() -> None:
            await self._wait(written, "save")
            await asyncio.to_thread(publish_checkpoint, aside, place, state)
            prune_checkpoints(place.parent, self._config.keep_last, self._config.keep_every)
            self._uploads.begin(owner, place)

        self._saving = owner.create_task(finish(), name=f"checkpoint {state['step']}")

    async def wait_saved(self) -> None:
        """Return when the checkpoint that was begun is in place, and uploaded if that is configured."""
        if self._saving is not None:
            await self._saving
        await self._uploads.wait()

    async def save_model(self, step: int) -> Path:
        """Write the model alone, in place of the one of a shorter run; return its directory."""
        await self.wait_saved()
        place = self._directory.path / "model"
        aside = staging_dir(place)
        await self._wait(await self._wait(self._learner.save(aside), "save"), "save")
        shutil.rmtree(aside / TRAINING_STATE)
        if place.is_dir():
            before = place.with_name(place.name + ".before")
            shutil.rmtree(before, ignore_errors=True)
            place.rename(before)
        publish_checkpoint(aside, place, {"step": step})
        shutil.rmtree(place.with_name(place.name + ".before"), ignore_errors=True)
        return place


def find_checkpoint(directory: RunDirectory, report: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Return the newest whole checkpoint of a run and its state; newer ones, which are damaged, are set aside."""
    found = newest_checkpoint(directory.checkpoints, report)
    set_aside_newer(found)
    return found, read_state(found)


def next_lineage(metrics: Path) -> int:
    """Return the number of the lineage that a resume begins: one more than that of any line of `metrics.jsonl`."""
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.is_file() else []
    return 1 + max((json.loads(line)["lineage"] for line in lines if line.endswith("\n")), default=0)
