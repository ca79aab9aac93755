"""The user's command that copies each complete checkpoint to another place."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from antiphon.core.config import environment_with
from antiphon.core.processes.child import describe_exit, start_child
from antiphon.core.processes.own_process import open_log
from antiphon.record.run_dir import RunDirectory


class CheckpointUploads:
    """Runs the command for one checkpoint at a time, while training goes on."""

    def __init__(self, command: str, seconds: float, directory: RunDirectory, report: Callable[[str], object]) -> None:
        """Prepare the uploads of a run.

        Args:
            command: Shell command; empty for none.
            seconds: Time limit of each; the command and what it started are killed afterwards.
            directory: The run's directory, whose `logs` get what the command prints.
            report: Called with a message if a command fails.
        """
        self._command = command
        self._seconds = seconds
        self._directory = directory
        self._report = report
        self._running: asyncio.Task[None] | None = None

    def begin(self, owner: asyncio.TaskGroup, checkpoint: Path) -> None:
        """Begin to upload a complete checkpoint, after `wait` for the one before."""
        if self._command:
            self._running = owner.create_task(self._run(checkpoint), name=f"upload of {checkpoint.name}")

    async def wait(self) -> None:
        """Return when the upload that was begun has ended."""
        if self._running is not None:
            await self._running

    async def _run(self, checkpoint: Path) -> None:
        run = self._directory.path.name
        variables = environment_with(ANTIPHON_CHECKPOINT=str(checkpoint.absolute()), ANTIPHON_RUN=run)
        log = self._directory.logs / "upload.log"
        with open_log(log) as output:
            child = start_child(
                ["sh", "-c", self._command],
                environment=variables,
                stdout=output,
                stderr=output,
                own_session=True,
            )
        try:
            ended = await child.wait(self._seconds)
        finally:
            child.kill()
        if not ended or child.exit_code != 0:
            how = (
                describe_exit(child.exit_code) if ended else f"did not end in {self._seconds:g} s (checkpoint.timeout)"
            )
            self._report(f"checkpoint.upload: the command for {checkpoint.name} {how}; what it printed is in {log}")
