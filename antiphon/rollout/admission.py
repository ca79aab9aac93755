"""Admission: which groups may live, how old they are, and what becomes of every attempt. No I/O, no clock, no asyncio.

The rules (B groups a step, async ratio α):

* A group holds a slot from `admit` until the weights it helped make are published, or until it ends untrained. Live
  groups never exceed ceil((1+α)·B) + extra_groups.
* The age of an attempt is the number of versions published since it started. A step takes only groups all of whose
  attempts are at most ceil(α) old, and with fractional α at most frac(α)·B groups of that greatest age. First-in
  first-out without extra groups keeps this by construction; here it is checked at every step, and kept by `publish`
  dropping what can no longer be used.
* Every attempt ends in exactly one terminal state, so dispatched = live + the sum of all terminal counts, always.

```
group    RUNNING ──G usable──▶ COMPLETE ──take──▶ TAKEN ──publish──▶ (released: attempts TRAINED)
            │                     │
            └─ failed, stale, cancelled; filtered ──▶ (released untrained)
attempt  RUNNING ──▶ FINISHED ──▶ TRAINED | FILTERED | STALE | CANCELLED | FAILED (its group failed)
            └──▶ FAILED | REDUNDANT | STALE | CANCELLED
```
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from antiphon.errors import FreshnessError, StateError
from antiphon.rollout.config import RolloutConfig
from antiphon.types import AttemptId, AttemptStatus, PolicyVersion


class GroupState(Enum):
    """The states of a group that holds a slot."""

    RUNNING = auto()
    COMPLETE = auto()
    TAKEN = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one event asks of the scheduler."""

    abort: tuple[AttemptId, ...] = ()  # running attempts that ended here
    retry: AttemptId | None = None  # a new attempt to start
    completed: bool = False  # the group has its G usable attempts
    failed: bool = False  # the group cannot get them


@dataclass(slots=True)
class _Group:
    id: int
    state: GroupState = GroupState.RUNNING
    attempts: dict[AttemptId, AttemptStatus] = field(default_factory=dict)
    started: dict[AttemptId, PolicyVersion] = field(default_factory=dict)

    def having(self, status: AttemptStatus) -> tuple[AttemptId, ...]:
        return tuple(attempt for attempt, is_now in self.attempts.items() if is_now is status)

    def oldest(self) -> PolicyVersion:
        """When the oldest attempt that may be trained on started."""
        usable = (AttemptStatus.RUNNING, AttemptStatus.FINISHED)
        return min(self.started[attempt] for attempt, status in self.attempts.items() if status in usable)


class Admission:
    """The state machine. `config` is the schedule; `version` the weights that attempts started now come from."""

    def __init__(self, config: RolloutConfig, version: PolicyVersion = PolicyVersion(0, 0)) -> None:
        self.config = config
        self.version = version
        self.dispatched = 0
        self.ended: Counter[AttemptStatus] = Counter()
        self._groups: dict[int, _Group] = {}  # live groups, in the order of admission
        self._next_group = 0

    # --- looking -------------------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Groups that hold a slot."""
        return len(self._groups)

    @property
    def room(self) -> int:
        """Groups that may be admitted now."""
        return self.config.capacity - self.live

    def live_attempts(self) -> int:
        """Attempts that have not ended."""
        return sum(len(group.attempts) - self._ended_in(group) for group in self._groups.values())

    def state(self, group: int) -> GroupState | None:
        """The state of a live group; None once its slot is released."""
        return self._groups[group].state if group in self._groups else None

    def started(self, attempt: AttemptId) -> PolicyVersion:
        """The version at which an attempt of a live group started."""
        return self._groups[attempt.group].started[attempt]

    # --- producing -----------------------------------------------------------------------------------------------------

    def admit(self) -> tuple[AttemptId, ...]:
        """Give a new group a slot and start its siblings, redundant ones included; `StateError` without room."""
        if self.room <= 0:
            raise StateError(f"no room: {self.live} groups live, capacity {self.config.capacity}")
        group = _Group(id=self._next_group)
        self._next_group += 1
        self._groups[group.id] = group
        siblings = range(self.config.group_size + self.config.redundancy)
        return tuple(self._start(group, AttemptId(group.id, sibling, 0)) for sibling in siblings)

    def finish(self, attempt: AttemptId, usable: bool) -> Change:
        """An attempt ran to its end. A late report of an attempt that was already ended changes nothing."""
        group = self._groups.get(attempt.group)
        if group is None or group.attempts[attempt] is not AttemptStatus.RUNNING:
            return Change()
        if not usable:
            return self._fail(group, attempt)
        group.attempts[attempt] = AttemptStatus.FINISHED
        if len(group.having(AttemptStatus.FINISHED)) < self.config.group_size:
            return Change()
        group.state = GroupState.COMPLETE
        redundant = group.having(AttemptStatus.RUNNING)
        self._end(group, redundant, AttemptStatus.REDUNDANT)
        return Change(abort=redundant, completed=True)

    def filter(self, group: int) -> None:
        """A complete group is rejected; its slot is free again."""
        rejected = self._groups[group]
        if rejected.state is not GroupState.COMPLETE:
            raise StateError(f"group {group} is {rejected.state.name}, only a complete group can be filtered")
        self._release(rejected, AttemptStatus.FILTERED)

    # --- consuming -----------------------------------------------------------------------------------------------------

    def take(self) -> tuple[int, ...] | None:
        """The B groups of the step that begins now, or None while they are not ready."""
        chosen = self._choose()
        if chosen is None:
            return None
        self._check_fresh(chosen)
        for group in chosen:
            group.state = GroupState.TAKEN
        return tuple(group.id for group in chosen)

    def publish(self) -> tuple[AttemptId, ...]:
        """A new version exists: taken groups are released as trained, groups that became too old are dropped.

        Returns the running attempts that were dropped and must be aborted.
        """
        for group in [g for g in self._groups.values() if g.state is GroupState.TAKEN]:
            self._release(group, AttemptStatus.TRAINED)
        self.version = self.version.next()
        dropped: list[AttemptId] = []
        for group in self._expired():
            dropped.extend(group.having(AttemptStatus.RUNNING))
            self._release(group, AttemptStatus.STALE)
        return tuple(dropped)

    def close(self) -> tuple[AttemptId, ...]:
        """The run ends: everything live is cancelled. Returns the running attempts."""
        running = [a for group in self._groups.values() for a in group.having(AttemptStatus.RUNNING)]
        for group in list(self._groups.values()):
            self._release(group, AttemptStatus.CANCELLED)
        return tuple(running)

    # --- inside --------------------------------------------------------------------------------------------------------

    def _start(self, group: _Group, attempt: AttemptId) -> AttemptId:
        group.attempts[attempt] = AttemptStatus.RUNNING
        group.started[attempt] = self.version
        self.dispatched += 1
        return attempt

    def _fail(self, group: _Group, attempt: AttemptId) -> Change:
        self._end(group, (attempt,), AttemptStatus.FAILED)
        if attempt.attempt + 1 < self.config.max_attempts:
            return Change(retry=self._start(group, AttemptId(group.id, attempt.sibling, attempt.attempt + 1)))
        running = group.having(AttemptStatus.RUNNING)
        if len(running) + len(group.having(AttemptStatus.FINISHED)) >= self.config.group_size:
            return Change()
        self._release(group, AttemptStatus.FAILED)
        return Change(abort=running, failed=True)

    def _choose(self) -> list[_Group] | None:
        waiting = [group for group in self._groups.values() if group.state is not GroupState.TAKEN]
        size = self.config.groups_per_step
        if self.config.order == "fifo":
            chosen = waiting[:size]
        else:
            complete = [group for group in waiting if group.state is GroupState.COMPLETE]
            chosen = sorted(complete, key=lambda group: group.oldest())[:size]  # stable: ties as admitted
            if self.config.on_expiry == "wait":
                due = [group for group in waiting if self._age(group) == self.config.max_age][:size]
                chosen = due + [group for group in chosen if group not in due][: size - len(due)]
        ready = len(chosen) == size and all(group.state is GroupState.COMPLETE for group in chosen)
        return chosen if ready else None

    def _expired(self) -> list[_Group]:
        """Groups no step can use any more, now that a version was published."""
        oldest = [group for group in self._groups.values() if self._age(group) == self.config.max_age]
        beyond_share = oldest[self.config.max_oldest :] if self.config.max_oldest < self.config.groups_per_step else []
        return [group for group in self._groups.values() if self._age(group) > self.config.max_age] + beyond_share

    def _check_fresh(self, groups: list[_Group]) -> None:
        ages = [self._age(group) for group in groups]
        if max(ages) > self.config.max_age or ages.count(self.config.max_age) > self.config.max_oldest:
            raise FreshnessError(f"a step at version {self.version.n} was offered groups of ages {ages}: {self.config}")

    def _age(self, group: _Group) -> int:
        return group.oldest().age(self.version)

    def _release(self, group: _Group, status: AttemptStatus) -> None:
        self._end(group, group.having(AttemptStatus.FINISHED) + group.having(AttemptStatus.RUNNING), status)
        del self._groups[group.id]

    def _end(self, group: _Group, attempts: tuple[AttemptId, ...], status: AttemptStatus) -> None:
        for attempt in attempts:
            group.attempts[attempt] = status
        self.ended[status] += len(attempts)

    @staticmethod
    def _ended_in(group: _Group) -> int:
        live = (AttemptStatus.RUNNING, AttemptStatus.FINISHED)
        return sum(status not in live for status in group.attempts.values())
