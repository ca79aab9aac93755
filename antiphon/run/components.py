"""The parts of a run that the loop works with, and the history that its checkpoints keep. `run/build.py` makes them."""

from dataclasses import dataclass, field

from antiphon.core.deadlines import Deadlines
from antiphon.rollout.backend import RolloutBackend
from antiphon.rollout.group_hooks import GroupHooks
from antiphon.run.config import RunConfig
from antiphon.run.launch.record import RunRecord
from antiphon.run.launch.tasks import TaskData
from antiphon.run.publisher import WeightPublisher
from antiphon.tasks.rewards.remote_judge import RemoteJudges


@dataclass(slots=True, kw_only=True)
class Components:
    """The parts of a run.

    Attributes:
        config: The run's configuration.
        deadlines: Bounds all waits.
        tasks: Prompts.
        rollouts: Engines and episodes.
        weights: The policy's version, and the learner behind it.
        record: Everything that is written.
        hooks: The user's functions that fill and filter groups.
        remote_judges: Judges behind an address, and what they cost.
    """

    config: RunConfig
    deadlines: Deadlines
    tasks: TaskData
    rollouts: RolloutBackend
    weights: WeightPublisher
    record: RunRecord
    hooks: GroupHooks = field(default_factory=GroupHooks)
    remote_judges: RemoteJudges = field(default_factory=RemoteJudges)


@dataclass(slots=True, kw_only=True)
class Progress:
    """History of a run that its checkpoints keep."""

    before: list[float] | None = None  # accuracy on each test prompt
    measures: dict[str, float] = field(default_factory=dict)  # of the same evaluation
    warm_start_seconds: float = 0.0
    seconds: float = 0.0  # of reinforcement learning
    alarms: dict[str, int] = field(default_factory=dict)  # each that was raised, with the first step of it
