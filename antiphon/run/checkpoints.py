"""Checkpoints of a run: the state of models, scheduler, data and ledger at one step, complete or absent."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.record.checkpoint import checkpoint_name, prune_checkpoints, publish_checkpoint, staging_dir
from antiphon.record.upload import CheckpointUploads
from antiphon.run.components import Components
from antiphon.run.publisher import LearnerAccess
from antiphon.run.waits import RunWaits


class RunCheckpoints:
    """Writes the checkpoints of a run, one at a time, while training goes on."""

    def __init__(self, parts: Components) -> None:
        self._parts = parts
        self._config = parts.config.checkpoint
        self._waits = RunWaits(parts.config, parts.deadlines)
        self._saving: asyncio.Task[None] | None = None
        record = parts.record
        self._uploads = CheckpointUploads(
            self._config.upload, self._config.timeout, record.directory, record.view.message
        )

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is written after `step`; the last one is written as the run ends."""
        every = self._config.every
        return bool(every) and step % every == 0 and step < self._parts.config.steps

    async def save(self, owner: asyncio.TaskGroup, learner: LearnerAccess, state: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint of `state`; return when the previous one is complete and the learner may go on."""
        await self.write(owner, await self.copy(learner, state["step"]), state)

    async def copy(self, learner: LearnerAccess, step: int) -> Path | None:
        """Copy the models as they are after `step`, once the previous checkpoint is complete.

        Returns:
            The folder that they are being written to; None if the checkpoint is there already.
        """
        await self.wait_saved()
        directory = self._parts.record.directory.checkpoints / checkpoint_name(step)
        if directory.is_dir():  # the one that the run was resumed from
            return None
        staging = staging_dir(directory)
        await learner.save(staging)
        return staging

    async def write(self, owner: asyncio.TaskGroup, staging: Path | None, state: Mapping[str, Any]) -> None:
        """Begin to complete the checkpoint that `copy` began in `staging`, if any, with the `state` of the run."""
        if staging is None:
            return
        record, version = self._parts.record, self._parts.weights.version
        directory = record.directory.checkpoints / checkpoint_name(state["step"])
        await self._waits(record.ledger.commit(), "commit", "the ledger")

        async def finish() -> None:
            await self._parts.weights.wait_saved()
            publishing = asyncio.ensure_future(record.in_thread(publish_checkpoint, staging, directory, state))
            try:
                await asyncio.shield(publishing)
            finally:  # a thread is not cancelled: in the next lineage the checkpoint would come from nowhere
                await asyncio.wait({publishing})
            record.ledger.add_checkpoint(state["step"], version, directory.name)
            prune_checkpoints(directory.parent, self._config.keep_last, self._config.keep_every)
            self._uploads.begin(owner, directory)

        self._saving = owner.create_task(finish(), name=f"checkpoint {state['step']}")

    async def wait_saved(self) -> None:
        """Return when the checkpoint that was begun is in place, and uploaded if that is configured."""
        if self._saving is not None:
            await self._waits(asyncio.shield(self._saving), "checkpoint", "a checkpoint to be in place")
        await self._uploads.wait()
