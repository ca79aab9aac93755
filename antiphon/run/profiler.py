"""Profiles of chosen training steps, one file a worker, as `profile` asks for.

Models are profiled in the stages of a step, where they run. Engines and graders are profiled from the end of the step before:
without asynchrony they have nothing to do while the stages run.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.core.profiles import Profiled
from antiphon.learning.step import Step
from antiphon.run.config import ProfileConfig

if TYPE_CHECKING:
    from antiphon.run.components import Components


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfiler:
    """Two stages: one starts the profile of a step before all others, one writes it after all others.

    Attributes:
        config: Which steps are profiled, and whether with memory.
        models: All models that are trained or asked in a step.
        directory: Directory with one folder a step.
    """

    config: ProfileConfig
    models: Profiled
    directory: Path

    async def start(self, step: Step) -> None:
        """Start to profile each rank of the models, if the step is to be profiled."""
        if step.number in self.config.steps:
            await self.models.start_profile(self.config.memory)

    async def write(self, step: Step) -> None:
        """Write these profiles, if the step was profiled."""
        if step.number in self.config.steps:
            await self.models.write_profile(step_folder(self.directory, step.number), "")


@asynccontextmanager
async def profile_rollouts(parts: "Components", step: int) -> AsyncIterator[None]:
    """Profile engines and graders for the context, if the step is to be profiled."""
    config, rollouts = parts.config.profile, parts.rollouts
    if step in config.steps:
        await rollouts.start_profile(config.memory)
    yield
    if step in config.steps:
        await rollouts.write_profile(step_folder(parts.record.directory.profile, step), "")


def step_folder(directory: Path, step: int) -> Path:
    """Return the folder of the profiles of a step."""
    return directory / f"step_{step:06d}"
