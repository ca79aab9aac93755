"""The record of a group that holds a slot, and what events ask of the scheduler."""

from dataclasses import dataclass, field
from enum import Enum, auto

from antiphon.core.types import AttemptId, AttemptStatus, PolicyVersion

USABLE = (AttemptStatus.RUNNING, AttemptStatus.FINISHED)


class GroupState(Enum):
    """The states of a group that holds a slot."""

    RUNNING = auto()
    COMPLETE = auto()
    TAKEN = auto()
    STALE = auto()  # too old for any later step; its slot is free once the present step is published


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Actions for the scheduler after an event."""

    abort: tuple[AttemptId, ...] = ()  # running attempts that ended here
    retry: AttemptId | None = None  # a new attempt to start
    completed: bool = False  # the group has its G usable attempts
    failed: bool = False  # the group cannot get them
    stale: tuple[int, ...] = ()  # groups that no later step can use


@dataclass(slots=True, eq=False)
class LiveGroup:
    """A group that holds a slot."""

    id: int
    admitted: PolicyVersion
    state: GroupState = GroupState.RUNNING
    attempts: dict[AttemptId, AttemptStatus] = field(default_factory=dict)
    started: dict[AttemptId, PolicyVersion] = field(default_factory=dict)
    finished: int = 0  # attempts, while the group is running

    def with_status(self, status: AttemptStatus) -> tuple[AttemptId, ...]:
        """Return the attempts that have a status."""
        return tuple(attempt for attempt, current in self.attempts.items() if current is status)

    def oldest_start(self) -> PolicyVersion:
        """Return the version at which the oldest usable attempt started: one that runs or has finished."""
        started = (self.started[attempt] for attempt, status in self.attempts.items() if status in USABLE)
        return min(started, default=self.admitted)

    def age(self, version: PolicyVersion) -> int:
        """Return how many versions were published up to `version` since the oldest usable attempt started."""
        return self.oldest_start().age(version)
