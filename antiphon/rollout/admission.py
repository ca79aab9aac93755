"""Admission: which groups may live, how old they are, and what becomes of every attempt. No I/O, no clock, no asyncio.

The rules (B groups a step, async ratio α):

* A group holds a slot from `admit` until the weights it helped make are published, or until it ends untrained. Live
  groups never exceed ceil((1+α)·B) + extra_groups.
* The age of an attempt is the number of versions published since it started. A step takes only groups all of whose
  attempts are at most ceil(α) old, and with fractional α at most frac(α)·B groups of that greatest age. First-in
  first-out without extra groups keeps this by construction; here it is checked at every step, and kept by `take` and
  `publish` dropping what no later step can use.
* Under a policy of rounds (the baselines) groups are admitted only by `begin_round`, when none is running.
* Every attempt ends in exactly one terminal state, so dispatched = live + the sum of all terminal counts, always.

```
group    RUNNING ──G usable──▶ COMPLETE ──take──▶ TAKEN ──publish──▶ (released: attempts TRAINED)
            │                     │
            └─ failed, stale, cancelled; filtered ──▶ (released untrained; what became stale by `take`: EXPIRED until publish)
attempt  RUNNING ──▶ FINISHED ──▶ TRAINED | FILTERED | STALE | CANCELLED | FAILED (its group failed)
            └──▶ FAILED | REDUNDANT | STALE | CANCELLED
```

Groups lie in the order of their admission, so also of the versions they were admitted at: what may be too old is a prefix,
and no event looks at all groups.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice, takewhile
from types import MappingProxyType

from antiphon.core.errors import FreshnessError, StateError
from antiphon.core.types import AttemptId, AttemptStatus, PolicyVersion
from antiphon.rollout.config import Policy, RolloutConfig


class GroupState(Enum):
    """The states of a group that holds a slot."""

    RUNNING = auto()
    COMPLETE = auto()
    TAKEN = auto()
    EXPIRED = auto()  # too old for any later step; its slot is free once the step in hand is published


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one event asks of the scheduler."""

    abort: tuple[AttemptId, ...] = ()  # running attempts that ended here
    retry: AttemptId | None = None  # a new attempt to start
    completed: bool = False  # the group has its G usable attempts
    failed: bool = False  # the group cannot get them
    stale: tuple[int, ...] = ()  # groups that no later step can use


Tell = Callable[[AttemptId, AttemptStatus], None]


@dataclass(slots=True, eq=False)
class _Group:
    id: int
    admitted: PolicyVersion
    state: GroupState = GroupState.RUNNING
    attempts: dict[AttemptId, AttemptStatus] = field(default_factory=dict)
    started: dict[AttemptId, PolicyVersion] = field(default_factory=dict)
    finished: int = 0  # attempts, while it runs

    def having(self, status: AttemptStatus) -> tuple[AttemptId, ...]:
        return tuple(attempt for attempt, is_now in self.attempts.items() if is_now is status)

    def oldest(self) -> PolicyVersion:
        """When the oldest attempt that may be trained on started."""
        usable = (AttemptStatus.RUNNING, AttemptStatus.FINISHED)
        started = (self.started[attempt] for attempt, status in self.attempts.items() if status in usable)
        return min(started, default=self.admitted)


class Admission:
    """The state machine. `config` is the schedule; `version` the weights that attempts started now come from; `tell` hears
    of every change of an attempt."""

    def __init__(
        self,
        config: RolloutConfig,
        version: PolicyVersion = PolicyVersion(0, 0),
        tell: Tell = lambda attempt, status: None,
    ) -> None:
        self.config = config
        self.version = version
        self.dispatched = 0
        self.ended: Counter[AttemptStatus] = Counter()
        self.running = 0  # groups
        self.next_group = 0  # number of the next new group
        self._tell = tell
        self._groups: dict[int, _Group] = {}  # live groups, in the order of admission
        self._complete: dict[int, _Group] = {}
        self._taken: list[_Group] = []
        self._expired: list[_Group] = []
        self._round = 0 if config.in_rounds else None  # groups that this round may still admit
        self._redundancy = config.redundancy

    # --- looking -------------------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Groups that hold a slot."""
        return len(self._groups)

    @property
    def room(self) -> int:
        """Groups that may be admitted now."""
        room = self.config.capacity - self.live
        return room if self._round is None else min(room, self._round)

    @property
    def ready(self) -> bool:
        """Whether a step may be taken."""
        return self._choose() is not None

    @property
    def complete(self) -> int:
        """Groups that a step may take."""
        return len(self._complete)

    @property
    def oldest_start(self) -> int:
        """The version, by its number, at which a trajectory must have started to be of use to a group that is admitted now."""
        next_step = self.version.n + bool(self._taken)
        oldest = next_step - self.config.max_age
        if self.config.max_oldest < self.config.groups_per_step:
            as_old = (group for group in self._groups.values() if group.state is not GroupState.TAKEN)
            oldest += sum(group.oldest().n <= oldest for group in as_old) >= self.config.max_oldest
        return oldest

    def live_attempts(self) -> int:
        """Attempts that have not ended."""
        return self.dispatched - self.ended.total()

    def groups(self) -> tuple[int, ...]:
        """The live groups, in the order of their admission."""
        return tuple(self._groups)

    def state(self, group: int) -> GroupState | None:
        """The state of a live group; None once its slot is released."""
        return self._groups[group].state if group in self._groups else None

    def started(self, attempt: AttemptId) -> PolicyVersion:
        """The version at which an attempt of a live group started."""
        return self._groups[attempt.group].started[attempt]

    # --- producing -----------------------------------------------------------------------------------------------------

    def begin_round(self, groups: int, redundancy: int) -> None:
        """Let the next round in: at most so many groups, with so many siblings beyond the group size each."""
        if self.running:
            raise StateError(f"a round cannot begin: {self.running} groups of the one before are running")
        self._round, self._redundancy = min(groups, self.config.capacity - self.live), redundancy

    def admit(
        self, number: int | None = None, begun: Mapping[int, int] = MappingProxyType({})
    ) -> tuple[int, tuple[AttemptId, ...]]:
        """Give a new group a slot and start its siblings, redundant ones included; `StateError` without room. With a
        sampling loop of the user's own, none is started.

        After a resume: `number` is that of a group which was live at the cut, and `begun` says of siblings which an earlier
        life of the run has finished at which version (its number) they started.
        """
        if self.room <= 0:
            raise StateError(f"no room: {self.live} groups live, capacity {self.config.capacity}")
        versions = {sibling: PolicyVersion(self.version.lineage, n) for sibling, n in begun.items()}
        admitted = min(versions.values(), default=self.version)
        group = _Group(id=self.next_group if number is None else number, admitted=admitted)
        self.next_group = max(self.next_group, group.id + 1)
        self._groups[group.id] = group
        if admitted < self.version:  # after groups that are younger
            self._groups = dict(sorted(self._groups.items(), key=lambda item: item[1].admitted))
        self.running += 1
        if self._round is not None:
            self._round -= 1
        siblings = range(0 if self.config.sampler else self.config.group_size + self._redundancy)
        attempts = (AttemptId(group.id, sibling, 0) for sibling in siblings)
        return group.id, tuple(self._start(group, a, versions.get(a.sibling, self.version)) for a in attempts)

    def start(self, group: int) -> AttemptId:
        """One attempt more in a running group, for a sampling loop of the user's own."""
        running = self._groups.get(group)
        if running is None or running.state is not GroupState.RUNNING:
            raise StateError(f"group {group} takes no more attempts")
        return self._start(running, AttemptId(group, len(running.attempts), 0), self.version)

    def drop(self, attempt: AttemptId) -> None:
        """A running attempt is not needed any more."""
        group = self._groups.get(attempt.group)
        if group is not None and group.attempts[attempt] is AttemptStatus.RUNNING:
            self._end(group, (attempt,), AttemptStatus.REDUNDANT)

    def give_up(self, group: int) -> Change:
        """A running group will get no more attempts, and fails."""
        running = self._groups.get(group)
        if running is None or running.state is not GroupState.RUNNING:
            return Change()
        abort = running.having(AttemptStatus.RUNNING)
        self._release(running, AttemptStatus.FAILED)
        return Change(abort=abort, failed=True)

    def finish(self, attempt: AttemptId, usable: bool) -> Change:
        """An attempt ran to its end. A late report of an attempt that was already ended changes nothing."""
        group = self._groups.get(attempt.group)
        if group is None or group.attempts[attempt] is not AttemptStatus.RUNNING:
            return Change()
        if not usable:
            return self._fail(group, attempt)
        group.attempts[attempt] = AttemptStatus.FINISHED
        self._tell(attempt, AttemptStatus.FINISHED)
        group.finished += 1
        if group.finished < self.config.group_size:
            return Change()
        group.state = GroupState.COMPLETE
        self.running -= 1
        self._complete[group.id] = group
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

    def take(self) -> tuple[tuple[int, ...], Change] | None:
        """The B groups of the step that begins now, or None while they are not ready.

        What no later step could use ends here, without waiting for the step: its attempts are to be aborted.
        """
        chosen = self._choose()
        if chosen is None:
            return None
        self._check_fresh(chosen)
        for group in chosen:
            group.state = GroupState.TAKEN
            del self._complete[group.id]
        self._taken = chosen
        too_old = [group for group in self._at_least(self.config.max_age) if group.state is not GroupState.TAKEN]
        abort = tuple(attempt for group in too_old for attempt in group.having(AttemptStatus.RUNNING))
        for group in too_old:
            self._end_all(group, AttemptStatus.STALE)
            group.state = GroupState.EXPIRED
        self._expired = too_old
        return tuple(group.id for group in chosen), Change(abort=abort, stale=tuple(group.id for group in too_old))

    def publish(self, version: PolicyVersion) -> Change:
        """Release taken groups as trained, and drop groups that are too old for `version`, which was published.

        Raises:
            StateError: It is not the version after the current one.
        """
        if version != self.version.next():
            raise StateError(f"{version} does not follow {self.version}")
        for group in self._taken:
            self._release(group, AttemptStatus.TRAINED)
        for group in self._expired:
            del self._groups[group.id]
        self._taken, self._expired = [], []
        self.version = version
        dropped = self._unusable()
        abort = tuple(attempt for group in dropped for attempt in group.having(AttemptStatus.RUNNING))
        for group in dropped:
            self._release(group, AttemptStatus.STALE)
        return Change(abort=abort, stale=tuple(group.id for group in dropped))

    def close(self) -> tuple[AttemptId, ...]:
        """The run ends: everything live is cancelled. Returns the running attempts."""
        running = [a for group in self._groups.values() for a in group.having(AttemptStatus.RUNNING)]
        for group in list(self._groups.values()):
            self._release(group, AttemptStatus.CANCELLED)
        self._taken, self._expired = [], []
        return tuple(running)

    # --- inside --------------------------------------------------------------------------------------------------------

    def _start(self, group: _Group, attempt: AttemptId, version: PolicyVersion) -> AttemptId:
        group.attempts[attempt] = AttemptStatus.RUNNING
        group.started[attempt] = version
        self.dispatched += 1
        self._tell(attempt, AttemptStatus.RUNNING)
        return attempt

    def _fail(self, group: _Group, attempt: AttemptId) -> Change:
        self._end(group, (attempt,), AttemptStatus.FAILED)
        if self.config.sampler:
            return Change()
        if attempt.attempt + 1 < self.config.max_attempts:
            retry = AttemptId(group.id, attempt.sibling, attempt.attempt + 1)
            return Change(retry=self._start(group, retry, self.version))
        if len(group.having(AttemptStatus.RUNNING) + group.having(AttemptStatus.FINISHED)) >= self.config.group_size:
            return Change()
        return self.give_up(group.id)

    def _choose(self) -> list[_Group] | None:
        size = self.config.groups_per_step
        if len(self._complete) < size or (self.config.policy is Policy.BATCH and self.running):
            return None
        if self.config.order == "fifo":
            chosen = list(islice(self._groups.values(), size))
        else:
            chosen = sorted(self._complete.values(), key=lambda group: (group.oldest(), group.id))[:size]
            if self.config.on_expiry == "wait":
                due = list(self._at_least(self.config.max_age))[:size]
                chosen = due + [group for group in chosen if group not in due][: size - len(due)]
        return chosen if all(group.state is GroupState.COMPLETE for group in chosen) else None

    def _at_least(self, age: int) -> Iterator[_Group]:
        """Groups that are so old now, taken ones included."""
        old_enough = takewhile(lambda group: group.admitted.age(self.version) >= age, self._groups.values())
        return (group for group in old_enough if group.state is GroupState.TAKEN or self._age(group) >= age)

    def _unusable(self) -> list[_Group]:
        """Groups that no step can use any more, now that a version was published."""
        oldest = list(self._at_least(self.config.max_age))
        usable = [group for group in oldest if self._age(group) == self.config.max_age]
        if self.config.max_oldest < self.config.groups_per_step:
            usable = usable[: self.config.max_oldest]
        kept = {group.id for group in usable}
        return [group for group in oldest if group.id not in kept]

    def _check_fresh(self, groups: list[_Group]) -> None:
        ages = [self._age(group) for group in groups]
        if max(ages) > self.config.max_age or ages.count(self.config.max_age) > self.config.max_oldest:
            raise FreshnessError(f"a step at version {self.version.n} was offered groups of ages {ages}: {self.config}")

    def _age(self, group: _Group) -> int:
        return group.oldest().age(self.version)

    def _release(self, group: _Group, status: AttemptStatus) -> None:
        self._end_all(group, status)
        del self._groups[group.id]

    def _end_all(self, group: _Group, status: AttemptStatus) -> None:
        self.running -= group.state is GroupState.RUNNING
        self._complete.pop(group.id, None)
        self._end(group, group.having(AttemptStatus.FINISHED) + group.having(AttemptStatus.RUNNING), status)

    def _end(self, group: _Group, attempts: tuple[AttemptId, ...], status: AttemptStatus) -> None:
        for attempt in attempts:
            group.attempts[attempt] = status
            self._tell(attempt, status)
        self.ended[status] += len(attempts)
