"""The state machine of admission, driven by hypothesis in every order of events it can meet."""

import math
import random
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from antiphon.core.errors import StateError
from antiphon.core.types import AttemptId, AttemptStatus, PolicyVersion
from antiphon.rollout.admission import Admission
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.live_group import Change, GroupState

RATIOS = [
    Fraction(0),
    Fraction(1, 10),
    Fraction(1, 4),
    Fraction(1, 2),
    Fraction(1),
    Fraction(3, 2),
    Fraction(2),
    Fraction(11, 4),
]


def config(**changes) -> RolloutConfig:
    defaults = {"groups_per_step": 4, "group_size": 2, "async_ratio": 1.0, "sampling": {"max_tokens": 8}}
    return RolloutConfig(**(defaults | changes))


class AdmissionMachine(RuleBasedStateMachine):
    """Keeps its own books of what was started, when, and how it ended, and compares after every event."""

    @initialize(
        ratio=st.sampled_from(RATIOS),
        groups=st.integers(1, 5),
        size=st.integers(1, 3),
        extra=st.integers(0, 3),
        redundancy=st.integers(0, 2),
        order=st.sampled_from(["fifo", "ready"]),
        on_expiry=st.sampled_from(["abort", "wait"]),
        tries=st.integers(1, 3),
        behind=st.integers(0, 2),
    )
    def begin(self, ratio, groups, size, extra, redundancy, order, on_expiry, tries, behind):
        self.ratio = ratio
        self.most_behind = min(behind, math.floor(ratio))  # versions that engines may be behind
        self.config = config(
            groups_per_step=groups,
            group_size=size,
            async_ratio=float(ratio),
            extra_groups=extra,
            redundancy=redundancy,
            order=order,
            on_expiry=on_expiry,
            max_attempts=tries,
        )
        self.admission = Admission(self.config)
        self.running: dict[AttemptId, int] = {}  # attempt -> version it started at
        self.finished: dict[int, dict[AttemptId, int]] = {}
        self.admitted: list[int] = []  # live groups, oldest admission first
        self.taken: tuple[int, ...] = ()
        self.stale: set[int] = set()
        self.version = self.engine_version = 0

    def check_nothing_expires(self, change):
        waits = self.config.order == "fifo" or self.config.on_expiry == "wait"
        assert not (change.stale and waits and not self.config.extra_groups), "steps wait for all"

    def started_in(self, group):
        """When the attempts of a group started that are running or finished."""
        return [v for a, v in self.running.items() if a.group == group] + list(self.finished[group].values())

    def drop_group(self, group):
        self.admitted.remove(group)
        self.finished.pop(group)
        self.running = {a: v for a, v in self.running.items() if a.group != group}

    @precondition(lambda self: self.admission.room > 0)
    @rule(groups=st.integers(1, 4))
    def admit(self, groups):
        for _ in range(min(groups, self.admission.room)):
            _, started = self.admission.admit()
            assert len(started) == self.config.group_size + self.config.redundancy
            self.admitted.append(started[0].group)
            self.finished[started[0].group] = {}
            self.running |= dict.fromkeys(started, self.engine_version)

    @precondition(lambda self: self.running)
    @rule(
        reports=st.lists(
            st.tuples(st.integers(0, 40), st.sampled_from([True, True, True, False])), min_size=1, max_size=12
        )
    )
    def finish(self, reports):
        """Several at once, since a hypothesis machine takes few steps."""
        for index, usable in reports:
            if self.running:
                self.report(sorted(self.running)[index % len(self.running)], usable)

    def report(self, attempt, usable):
        change = self.admission.finish(attempt, usable)
        started = self.running.pop(attempt)
        if usable:
            self.finished[attempt.group][attempt] = started
        if change.retry:
            assert (
                not usable and change.retry.sibling == attempt.sibling and change.retry.attempt == attempt.attempt + 1
            )
            self.running[change.retry] = self.engine_version
        assert bool(change.retry) == (not usable and attempt.attempt + 1 < self.config.max_attempts)
        rest = {a for a in self.running if a.group == attempt.group}
        assert change.completed == (usable and len(self.finished[attempt.group]) == self.config.group_size)
        assert change.failed == (len(rest) + len(self.finished[attempt.group]) < self.config.group_size)
        if change.completed or change.failed:
            assert set(change.abort) == rest
            self.running = {a: v for a, v in self.running.items() if a not in rest}
        if change.failed:
            self.drop_group(attempt.group)
        assert self.admission.finish(attempt, usable) == type(change)(), "a late report changes nothing"

    def complete(self):
        return [g for g in self.admitted if self.admission.state(g) is GroupState.COMPLETE]

    @rule(data=st.data())
    def filter(self, data):
        if complete := self.complete():
            self.reject(data.draw(st.sampled_from(complete)))

    def reject(self, group):
        self.admission.filter(group)
        self.drop_group(group)

    @precondition(lambda self: not self.taken)
    @rule()
    def take(self):
        before = {g for g in self.admitted if self.admission.state(g) is not None}
        result = self.admission.take()
        if result is None:
            return
        taken, change = result
        assert len(set(taken)) == self.config.groups_per_step
        ages = [self.version - min(self.finished[group].values()) for group in taken]
        greatest = math.ceil(self.ratio)
        fraction = self.ratio - math.floor(self.ratio)
        assert max(ages) <= greatest
        if fraction:
            assert ages.count(greatest) <= math.ceil(fraction * self.config.groups_per_step)
        if self.config.order == "fifo":
            assert list(taken) == self.admitted[: len(taken)]
        self.taken = taken
        self.check_nothing_expires(change)
        assert set(change.stale) <= before - set(taken)
        assert set(change.abort) == {a for a in self.running if a.group in change.stale}
        self.stale = set(change.stale)
        for group in change.stale:
            assert self.version - min(self.started_in(group)) == greatest
            self.finished[group] = {}
            self.running = {a: v for a, v in self.running.items() if a.group != group}

    @precondition(lambda self: self.taken)
    @rule(to_engines=st.booleans())
    def publish(self, to_engines):
        before = {g for g in self.admitted if self.admission.state(g) is not None}
        to_engines = to_engines or self.version + 1 - self.engine_version > self.most_behind
        change = self.admission.publish(self.admission.version.next(), to_engines)
        self.version += 1
        self.engine_version = self.version if to_engines else self.engine_version
        for group in {*self.taken, *self.stale}:
            self.drop_group(group)
        released = {g for g in before - set(self.taken) - self.stale if self.admission.state(g) is None}
        assert set(change.stale) == released
        assert set(change.abort) == {a for a in self.running if a.group in released}
        for group in released:
            self.drop_group(group)
        self.check_nothing_expires(change)
        self.taken = ()
        if not self.running:
            ready = self.admission.complete + max(self.admission.room, 0)
            assert ready >= self.config.groups_per_step, "the next step can have its groups"

    @rule(really=st.sampled_from([False] * 7 + [True]))
    def close_and_begin_again(self, really):
        if not really:  # else few steps get far
            return
        assert set(self.admission.close()) == set(self.running)
        assert self.admission.live == self.admission.live_attempts() == 0
        assert self.admission.dispatched == self.admission.ended.total()
        self.admission = Admission(self.config, PolicyVersion(0, self.version))
        self.running, self.finished, self.admitted, self.taken = {}, {}, [], ()
        self.stale, self.engine_version = set(), self.version

    @invariant()
    def slots_are_bounded(self):
        if hasattr(self, "admission"):
            exact = math.ceil((1 + self.ratio) * self.config.groups_per_step) + self.config.extra_groups
            assert self.admission.live == len(self.admitted) <= exact

    @invariant()
    def dispatched_is_live_plus_ended(self):
        if hasattr(self, "admission"):
            live = len(self.running) + sum(map(len, self.finished.values()))
            assert self.admission.live_attempts() == live
            assert self.admission.dispatched == live + self.admission.ended.total()

    @invariant()
    def groups_are_counted_by_state(self):
        if hasattr(self, "admission"):
            states = [self.admission.state(group) for group in self.admitted]
            assert self.admission.running == states.count(GroupState.RUNNING)
            assert self.admission.complete == states.count(GroupState.COMPLETE)


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("seed", range(60))
def test_long_lives_keep_the_books(seed):
    """The same books over hundreds of events, as a run has them: a machine of hypothesis seldom comes to a second step."""
    draw = random.Random(seed)
    machine = AdmissionMachine()
    machine.begin(
        ratio=draw.choice(RATIOS),
        groups=draw.randint(1, 5),
        size=draw.randint(1, 3),
        extra=draw.choice([0, 0, 1, 2, 3]),
        redundancy=draw.randint(0, 2),
        order=draw.choice(["fifo", "ready"]),
        on_expiry=draw.choice(["abort", "wait"]),
        tries=draw.randint(1, 3),
        behind=draw.randint(0, 2),
    )
    reliability, steps = draw.choice([0.6, 0.9, 1.0]), 0
    for _ in range(600):
        event = draw.choices(["admit", "report", "filter", "take", "publish"], [4, 16, 0.3, 4, 2])[0]
        if event == "admit" and machine.admission.room > 0:
            machine.admit(1)
        elif event == "report" and machine.running:
            machine.report(draw.choice(sorted(machine.running)), draw.random() < reliability)
        elif event == "filter" and machine.complete():
            machine.reject(draw.choice(machine.complete()))
        elif event == "take" and not machine.taken:
            machine.take()
        elif event == "publish" and machine.taken:
            machine.publish(draw.random() < 0.3)
            steps += 1
        machine.slots_are_bounded()
        machine.dispatched_is_live_plus_ended()
        machine.groups_are_counted_by_state()
    assert steps > 5
    machine.close_and_begin_again(True)


def run_step(admission: Admission, every: int = 1) -> list[int]:
    """Admit all there is room for, finish everything, take a step; return the ages it trained on."""
    while admission.room > 0:
        for attempt in admission.admit()[1]:
            admission.finish(attempt, usable=True)
    result = admission.take()
    assert result is not None
    ages = [admission.version.n - admission.start_version(AttemptId(group, 0, 0)).n for group in result[0]]
    version = admission.version.next()
    admission.publish(version, version.n % every == 0)
    return ages


@pytest.mark.parametrize(
    ("ratio", "steady"), [(0, [0] * 4), (0.5, [1, 1, 0, 0]), (1, [1] * 4), (1.5, [2, 2, 1, 1]), (2, [2] * 4)]
)
def test_steady_state_ages(ratio, steady):
    admission = Admission(config(async_ratio=ratio))
    ages = [run_step(admission) for _ in range(8)]
    assert ages[-1] == steady
    assert +admission.ended == {AttemptStatus.TRAINED: 8 * 4 * 2}


@pytest.mark.parametrize(
    ("ratio", "every", "steady"),
    [
        (1, 2, [[0] * 4, [1] * 4]),  # generates two steps' groups at once, after each update
        (2, 2, [[2] * 4, [1] * 4]),
        (2, 3, [[0] * 4, [1] * 4, [2] * 4]),
        (1.5, 2, [[2, 2, 0, 0], [1] * 4]),
    ],
)
def test_ages_where_engines_are_updated_every_few_steps(ratio, every, steady):
    admission = Admission(config(async_ratio=ratio))
    ages = [run_step(admission, every) for _ in range(6 * every)]
    assert ages[-every:] == steady
    assert +admission.ended == {AttemptStatus.TRAINED: 6 * every * 4 * 2}


def test_synchronous_run_admits_nothing_while_it_trains():
    admission = Admission(config(async_ratio=0))
    for _ in range(4):
        for attempt in admission.admit()[1]:
            admission.finish(attempt, usable=True)
    assert admission.take() is not None
    assert admission.room == 0
    with pytest.raises(StateError, match="no room"):
        admission.admit()
    admission.publish(admission.version.next())
    assert admission.room == 4


def test_waiting_for_a_group_that_is_due_instead_of_dropping_it():
    deadlines = Admission(config(order="ready", on_expiry="wait", groups_per_step=1, async_ratio=1))
    _, slow = deadlines.admit()
    for attempt in deadlines.admit()[1]:
        deadlines.finish(attempt, usable=True)
    assert deadlines.take() is not None and deadlines.publish(deadlines.version.next()).abort == ()
    for attempt in deadlines.admit()[1]:
        deadlines.finish(attempt, usable=True)
    assert deadlines.take() is None, "the slow group would be too old after this step"
    for attempt in slow:
        deadlines.finish(attempt, usable=True)
    assert deadlines.take()[0] == (slow[0].group,)


def test_groups_that_are_due_together_are_not_left_to_one_step():
    """Four groups are slow, and two steps are left that may take two of them each: no step may take others instead."""
    admission = Admission(config(order="ready", on_expiry="wait", groups_per_step=2, async_ratio=2))
    slow = [admission.admit()[1] for _ in range(4)]

    def admit_and_finish(groups):
        for _ in range(groups):
            for attempt in admission.admit()[1]:
                admission.finish(attempt, usable=True)

    admit_and_finish(2)
    assert admission.take() is not None
    admission.publish(admission.version.next())
    admit_and_finish(2)
    assert admission.take() is None
    for group in slow[2:]:
        for attempt in group:
            admission.finish(attempt, usable=True)
    assert admission.take() == ((slow[2][0].group, slow[3][0].group), Change())


def test_dropping_a_group_that_became_too_old():
    admission = Admission(config(order="ready", groups_per_step=1, async_ratio=0, extra_groups=1))
    _, slow = admission.admit()
    for attempt in admission.admit()[1]:
        admission.finish(attempt, usable=True)
    _, change = admission.take()
    assert (change.abort, change.stale) == (slow, (slow[0].group,))
    assert admission.room == 0, "what came now would be too old as well"
    admission.publish(admission.version.next())
    assert admission.room == 2
    assert admission.ended[AttemptStatus.STALE] == len(slow)
    assert admission.finish(slow[0], usable=True).completed is False


def test_redundant_siblings_make_up_for_a_failed_one():
    """A group fails only once fewer siblings than it needs can still be scored."""
    admission = Admission(config(redundancy=1, max_attempts=1))
    _, (first, second, third) = admission.admit()
    assert admission.finish(first, usable=False) == Change()
    assert admission.finish(second, usable=True) == Change()
    assert admission.finish(third, usable=False) == Change(failed=True)
    assert +admission.ended == {AttemptStatus.FAILED: 3}


def test_a_group_is_as_old_as_its_oldest_attempt():
    """One whose sibling failed and began again later is not younger for that."""
    admission = Admission(config(order="ready", groups_per_step=1, async_ratio=1, on_expiry="abort", max_attempts=2))
    _, (first, second) = admission.admit()
    for attempt in admission.admit()[1]:
        admission.finish(attempt, usable=True)
    assert admission.take() is not None
    admission.publish(admission.version.next())
    admission.finish(first, usable=True)
    assert admission.finish(second, usable=False).retry is not None
    for attempt in admission.admit()[1]:
        admission.finish(attempt, usable=True)
    _, change = admission.take()
    assert change.stale == (first.group,), "after this step its first attempt is two versions old"


@pytest.mark.parametrize("training", [False, True])
def test_what_a_group_that_is_admitted_now_may_be_given(training):
    """A sibling of an earlier life that is as old as is allowed can still be trained on in the next step, an older one not."""
    for older in (0, 1):
        admission = Admission(config(order="ready", groups_per_step=1, async_ratio=1), version=PolicyVersion(0, 5))
        if training:
            for attempt in admission.admit()[1]:
                admission.finish(attempt, usable=True)
            assert admission.take() is not None
        begun = dict.fromkeys(range(2), admission.oldest_start - older)
        group, attempts = admission.admit(begun=begun)
        for attempt in attempts:
            admission.finish(attempt, usable=True)
        if training:
            assert admission.publish(admission.version.next()).stale == ((group,) if older else ())
        if not older:
            assert admission.take()[0] == (group,)


def test_groups_of_an_earlier_life_share_what_a_step_takes_of_the_greatest_age():
    """With a ratio of 1/2, two groups of four may be one version old: a third is of no use unless it is fresh."""
    admission = Admission(config(async_ratio=0.5), version=PolicyVersion(0, 5))
    for oldest in (4, 4, 5):
        assert admission.oldest_start == oldest
        admission.admit(begun={0: 4})
