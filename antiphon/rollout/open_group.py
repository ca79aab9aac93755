"""A group between its admission and its end, as the scheduler sees it."""

import asyncio
from dataclasses import dataclass, field

from antiphon.core.types import Group, GroupOutcome, Prompt, Trajectory


@dataclass(slots=True)
class OpenGroup:
    """Prompt and usable trajectories of a group."""

    prompt: Prompt
    opened: float  # loop time
    sampling_task: asyncio.Task[None] | None = None  # runs a sampling loop of the user's own
    trajectories: dict[int, Trajectory] = field(default_factory=dict)  # by sibling, the usable ones
    sequence_number: int = 0  # of the ledger, when the last trajectory was added

    def add(self, trajectory: Trajectory, sequence_number: int) -> None:
        """Add a usable trajectory."""
        self.trajectories[trajectory.meta.id.sibling] = trajectory
        self.sequence_number = sequence_number

    def to_group(self, number: int) -> Group:
        """Return the complete group, its trajectories in the order of siblings."""
        ordered = tuple(self.trajectories[sibling] for sibling in sorted(self.trajectories))
        return Group(id=number, prompt=self.prompt, trajectories=ordered, outcome=GroupOutcome.COMPLETE)

    def cancel_sampling(self) -> None:
        """Cancel the user's own sampling loop, if there is one."""
        if self.sampling_task is not None:
            self.sampling_task.cancel()
