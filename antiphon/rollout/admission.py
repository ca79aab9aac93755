"""Admission: which groups may live, and what becomes of every attempt. A state machine without I/O, clock or asyncio.

The rules (B groups a step, async ratio α):

* A group holds a slot from `admit` until the weights it helped make are published, or until it ends untrained. Live
  groups never exceed ceil((1+α)·B) + extra_groups. While engines are k versions behind, none is admitted above k·B fewer.
* The age of an attempt is the number of versions published since that of the engines when it started. A step takes only groups
  whose attempts are at most ceil(α) old, and with fractional α at most frac(α)·B groups of that greatest age. First-in
  first-out without extra groups keeps this by construction. It is checked at every step, and `take` and `publish` drop
  what no later step can use (`freshness`).
* Under `rollout.policy: batch`, `one_step_off` or `tail_batching` (the baselines, which go by rounds) groups are admitted
  only by `begin_round`, when none is running.
* Every attempt ends in exactly one terminal state, so dispatched = live + the sum of all terminal counts, always.

```
group    RUNNING ──G usable──▶ COMPLETE ──take──▶ TAKEN ──publish──▶ (released: attempts TRAINED)
            │                     │
            │                     └─ filtered ───────────────▶ (released untrained, at once)
            └─────────────────────┴─ failed, stale, cancelled, lost ──▶ (the same; what `take` finds too old: at publish)
attempt  RUNNING ──▶ FINISHED ──▶ TRAINED | FILTERED | STALE | CANCELLED | LOST | FAILED (its group failed)
            └──▶ FAILED | REDUNDANT | STALE | CANCELLED | LOST
```

`docs/statuses.md` says of each status who sets it and where it is seen.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from antiphon.core.errors import StateError
from antiphon.core.types import AttemptId, AttemptStatus, PolicyVersion
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.freshness import (
    check_fresh,
    choose_groups,
    find_old_groups,
    find_oldest_start,
    find_unusable_groups,
)
from antiphon.rollout.live_group import USABLE, Change, GroupState, LiveGroup

StatusListener = Callable[[AttemptId, AttemptStatus], None]


class Admission:
    """The groups that hold a slot, and every attempt of them."""

    def __init__(
        self,
        config: RolloutConfig,
        version: PolicyVersion = PolicyVersion(0, 0),
        on_status: StatusListener = lambda attempt, status: None,
    ) -> None:
        """Create an admission without groups.

        Args:
            config: The schedule.
            version: The version of the learner and of the engines.
            on_status: Called with every new status of an attempt.
        """
        self.config = config
        self.version = version
        self.engine_version = version
        self.dispatched = 0
        self.ended: Counter[AttemptStatus] = Counter()
        self.running = 0  # groups
        self.next_group = 0  # number of the next new group
        self._on_status = on_status
        self._groups: dict[int, LiveGroup] = {}  # live groups, in the order of admission
        self._complete: dict[int, LiveGroup] = {}
        self._taken: list[LiveGroup] = []
        self._stale: list[LiveGroup] = []
        self._round = 0 if config.in_rounds else None  # groups that this round may still admit
        self._redundancy = config.redundancy

    # --- state ---------------------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Number of groups that hold a slot."""
        return len(self._groups)

    @property
    def room(self) -> int:
        """Number of groups that may be admitted now; it may be below 0 while engines are behind."""
        room = self.config.capacity - self.live - self.engine_version.age(self.version) * self.config.groups_per_step
        return room if self._round is None else min(room, self._round)

    @property
    def ready(self) -> bool:
        """True if a step may be taken."""
        return self._choose() is not None

    @property
    def complete(self) -> int:
        """Number of groups that a step may take."""
        return len(self._complete)

    @property
    def oldest_start(self) -> int:
        """Number of the version at which a trajectory must have started to be of use to a group admitted now."""
        return find_oldest_start(self.config, self._groups.values(), self.version, bool(self._taken))

    def live_attempts(self) -> int:
        """Return how many attempts have not ended."""
        return self.dispatched - self.ended.total()

    def groups(self) -> tuple[int, ...]:
        """Return the numbers of the live groups, in the order of their admission."""
        return tuple(self._groups)

    def live_groups(self) -> Collection[LiveGroup]:
        """Return the live groups, in the order of their admission."""
        return self._groups.values()

    def state(self, group: int) -> GroupState | None:
        """Return the state of a live group; None once its slot is released."""
        return self._groups[group].state if group in self._groups else None

    def start_version(self, attempt: AttemptId) -> PolicyVersion:
        """Return the version at which an attempt of a live group started."""
        return self._groups[attempt.group].started[attempt]

    # --- producing -----------------------------------------------------------------------------------------------------

    def begin_round(self, groups: int, redundancy: int) -> None:
        """Allow the next round: at most this many groups, each with `redundancy` siblings beyond the group size."""
        if self.running:
            raise StateError(f"a round cannot begin: {self.running} groups of the last one are running")
        self._round, self._redundancy = min(groups, self.config.capacity - self.live), redundancy

    def admit(
        self, number: int | None = None, begun: Mapping[int, int] = MappingProxyType({})
    ) -> tuple[int, tuple[AttemptId, ...]]:
        """Give a new group a slot and start its siblings, redundant ones included.

        With a sampling loop of the user's own, no sibling is started.

        Args:
            number: After a resume, the number of a group that was live at the checkpoint.
            begun: After a resume, siblings that an earlier lineage finished, and the number of the version at which
                each started.

        Returns:
            The number of the group and the attempts that started.

        Raises:
            StateError: If there is no room.
        """
        if self.room <= 0:
            raise StateError(f"no room: {self.live} groups live, capacity {self.config.capacity}")
        versions = {sibling: PolicyVersion(self.version.lineage, n) for sibling, n in begun.items()}
        admitted = min(versions.values(), default=self.engine_version)
        group = LiveGroup(id=self.next_group if number is None else number, admitted=admitted)
        self.next_group = max(self.next_group, group.id + 1)
        self._groups[group.id] = group
        if admitted < self.engine_version:  # keep the order of age: it was admitted after younger groups
            self._groups = dict(sorted(self._groups.items(), key=lambda item: item[1].admitted))
        self.running += 1
        if self._round is not None:
            self._round -= 1
        siblings = range(0 if self.config.sampler else self.config.group_size + self._redundancy)
        attempts = (AttemptId(group.id, sibling, 0) for sibling in siblings)
        return group.id, tuple(self._start(group, a, versions.get(a.sibling, self.engine_version)) for a in attempts)

    def start(self, group: int) -> AttemptId:
        """Start one more attempt in a running group, for a sampling loop of the user's own."""
        running = self._groups.get(group)
        if running is None or running.state is not GroupState.RUNNING:
            raise StateError(f"group {group} takes no more attempts")
        return self._start(running, AttemptId(group, len(running.attempts), 0), self.engine_version)

    def drop(self, attempt: AttemptId) -> None:
        """End a running attempt that is not needed any more."""
        group = self._groups.get(attempt.group)
        if group is not None and group.attempts[attempt] is AttemptStatus.RUNNING:
            self._end(group, (attempt,), AttemptStatus.REDUNDANT)

    def give_up(self, group: int) -> Change:
        """Fail a running group, which will get no more attempts."""
        running = self._groups.get(group)
        if running is None or running.state is not GroupState.RUNNING:
            return Change()
        abort = running.with_status(AttemptStatus.RUNNING)
        self._release(running, AttemptStatus.FAILED)
        return Change(abort=abort, failed=True)

    def finish(self, attempt: AttemptId, usable: bool) -> Change:
        """Record the end of an attempt, `usable` if it has a score and did not fail.

        A late report of an attempt that had already ended changes nothing.
        """
        group = self._groups.get(attempt.group)
        if group is None or group.attempts[attempt] is not AttemptStatus.RUNNING:
            return Change()
        if not usable:
            return self._fail(group, attempt)
        group.attempts[attempt] = AttemptStatus.FINISHED
        self._on_status(attempt, AttemptStatus.FINISHED)
        group.finished += 1
        if group.finished < self.config.group_size:
            return Change()
        group.state = GroupState.COMPLETE
        self.running -= 1
        self._complete[group.id] = group
        redundant = group.with_status(AttemptStatus.RUNNING)
        self._end(group, redundant, AttemptStatus.REDUNDANT)
        return Change(abort=redundant, completed=True)

    def filter(self, group: int) -> None:
        """Reject a complete group; its slot is free again."""
        rejected = self._groups[group]
        if rejected.state is not GroupState.COMPLETE:
            raise StateError(f"group {group} is {rejected.state.name}, only a complete group can be filtered")
        self._release(rejected, AttemptStatus.FILTERED)

    # --- consuming -----------------------------------------------------------------------------------------------------

    def take(self) -> tuple[tuple[int, ...], Change] | None:
        """Take the B groups of the step that begins now; return None while they are not ready.

        Other groups that will be too old for the next step end here too. They keep their slots until `publish`;
        `Change.abort` has their running attempts.
        """
        chosen = self._choose()
        if chosen is None:
            return None
        check_fresh(self.config, chosen, self.version)
        for group in chosen:
            group.state = GroupState.TAKEN
            del self._complete[group.id]
        self._taken = chosen
        old = find_old_groups(self._groups.values(), self.version, self.config.max_age)
        too_old = [group for group in old if group.state is not GroupState.TAKEN]
        abort = tuple(attempt for group in too_old for attempt in group.with_status(AttemptStatus.RUNNING))
        for group in too_old:
            self._end_all(group, AttemptStatus.STALE)
            group.state = GroupState.STALE
        self._stale = too_old
        return tuple(group.id for group in chosen), Change(abort=abort, stale=tuple(group.id for group in too_old))

    def publish(self, version: PolicyVersion, to_engines: bool = True) -> Change:
        """Release the taken groups as trained, and drop groups that are too old at `version`, which engines may not get.

        Raises:
            StateError: It is not the version after the current one.
        """
        if version != self.version.next():
            raise StateError(f"{version} does not follow {self.version}")
        for group in self._taken:
            self._release(group, AttemptStatus.TRAINED)
        for group in self._stale:
            del self._groups[group.id]
        self._taken, self._stale, self.version = [], [], version
        self.engine_version = version if to_engines else self.engine_version
        dropped = find_unusable_groups(self.config, self._groups.values(), self.version)
        abort = tuple(attempt for group in dropped for attempt in group.with_status(AttemptStatus.RUNNING))
        for group in dropped:
            self._release(group, AttemptStatus.STALE)
        return Change(abort=abort, stale=tuple(group.id for group in dropped))

    def close(self, status: AttemptStatus = AttemptStatus.CANCELLED) -> tuple[AttemptId, ...]:
        """End everything live with `status`, at the end of the run; return the attempts that were running."""
        running = [a for group in self._groups.values() for a in group.with_status(AttemptStatus.RUNNING)]
        for group in list(self._groups.values()):
            self._release(group, status)
        self._taken, self._stale = [], []
        return tuple(running)

    # --- inside --------------------------------------------------------------------------------------------------------

    def _start(self, group: LiveGroup, attempt: AttemptId, version: PolicyVersion) -> AttemptId:
        group.attempts[attempt] = AttemptStatus.RUNNING
        group.started[attempt] = version
        self.dispatched += 1
        self._on_status(attempt, AttemptStatus.RUNNING)
        return attempt

    def _fail(self, group: LiveGroup, attempt: AttemptId) -> Change:
        self._end(group, (attempt,), AttemptStatus.FAILED)
        if self.config.sampler:
            return Change()
        if attempt.attempt + 1 < self.config.max_attempts:
            retry = AttemptId(group.id, attempt.sibling, attempt.attempt + 1)
            return Change(retry=self._start(group, retry, self.engine_version))
        usable = sum(status in USABLE for status in group.attempts.values())
        return Change() if usable >= self.config.group_size else self.give_up(group.id)

    def _choose(self) -> list[LiveGroup] | None:
        return choose_groups(self.config, self._groups.values(), self._complete, self.version, self.running)

    def _release(self, group: LiveGroup, status: AttemptStatus) -> None:
        self._end_all(group, status)
        del self._groups[group.id]

    def _end_all(self, group: LiveGroup, status: AttemptStatus) -> None:
        self.running -= group.state is GroupState.RUNNING
        self._complete.pop(group.id, None)
        self._end(group, group.with_status(AttemptStatus.FINISHED) + group.with_status(AttemptStatus.RUNNING), status)

    def _end(self, group: LiveGroup, attempts: tuple[AttemptId, ...], status: AttemptStatus) -> None:
        for attempt in attempts:
            group.attempts[attempt] = status
            self._on_status(attempt, status)
        self.ended[status] += len(attempts)
