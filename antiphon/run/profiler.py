"""Profiles of chosen training steps by torch's profiler, one file a rank of the learner, as `profile` asks for."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.workers import WorkerHandle
from antiphon.learning.step import Step
from antiphon.run.config import ProfileConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfiler:
    """Two stages: one starts the profile of a step before all others, one writes it after all others.

    Attributes:
        config: Which steps are profiled, and whether with memory.
        ranks: Workers of the learner, one a rank.
        directory: Directory with one folder a step, and in it the files of each rank.
    """

    config: ProfileConfig
    ranks: Sequence[WorkerHandle]
    directory: Path

    async def start(self, step: Step) -> None:
        """Start to profile each rank, if the step is to be profiled."""
        if step.number in self.config.steps:
            await asyncio.gather(*(rank.call("start_profile", self.config.memory) for rank in self.ranks))

    async def write(self, step: Step) -> None:
        """Write the profile of each rank, if the step was profiled."""
        if step.number in self.config.steps:
            folder = self.directory / f"step_{step.number:06d}"
            await asyncio.gather(*(rank.call("write_profile", folder, rank.name) for rank in self.ranks))
