"""The request queue against a model that keeps plain lists and sorts them."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from antiphon.core.errors import RequestError
from antiphon.core.types import FinishReason, GenerateRequest, OnUpdate, Sampling, WeightsUpdate
from antiphon.engines.deltas import Delta
from antiphon.engines.request_queue import Continuation, Progress, RequestQueue, choose_continuation

CAPACITY = 3
IDS = st.sampled_from([f"r{number}" for number in range(8)])


def make_request(name: str, priority: int = 0) -> GenerateRequest:
    return GenerateRequest(id=name, tokens=np.zeros(1, np.int32), sampling=Sampling(max_tokens=1), priority=priority)


def make_update(version: int) -> WeightsUpdate:
    return WeightsUpdate(version=version, location="", manifest=None)


class Engine:
    """Keeps the order of what its queue asks of it."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.deltas: list[Delta] = []
        self.queue: RequestQueue[str] = RequestQueue(
            capacity, start=self._start, stop=self.stopped.append, emit=self.deltas.append
        )

    def _start(self, request: GenerateRequest) -> str:
        self.started.append(request.id)
        return request.id


class QueueMachine(RuleBasedStateMachine):
    """Any sequence of calls; the model is a list of waiting (priority, arrival, id) and a set of running ids."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.queue = self.engine.queue
        self.arrivals, self.versions = itertools.count(), itertools.count()
        self.waiting: list[tuple[int, int, str]] = []
        self.running: set[str] = set()
        self.holds: set[str] = set()
        self.draining: int | None = None
        self.aborted: list[str] = []
        self.stopped: list[str] = []
        self.started: list[str] = []

    def known(self) -> set[str]:
        return self.running | {name for _, _, name in self.waiting}

    @rule(name=IDS, priority=st.integers(-1, 1))
    def add(self, name: str, priority: int) -> None:
        if name in self.known():
            with pytest.raises(RequestError):
                self.queue.add(make_request(name, priority))
            return
        self.queue.add(make_request(name, priority))
        self.waiting.append((priority, next(self.arrivals), name))

    @rule(name=IDS)
    def abort(self, name: str) -> None:
        assert self.queue.abort(name) == (name in self.known())
        if name in self.known():
            self.aborted.append(name)
        if name in self.running:
            self.stopped.append(name)
        self.running.discard(name)
        self.waiting = [entry for entry in self.waiting if entry[2] != name]

    @rule()
    def admit(self) -> None:
        self.queue.admit()
        while self.waiting and len(self.running) < CAPACITY and not self.holds and self.draining is None:
            first = min(self.waiting)
            self.waiting.remove(first)
            self.running.add(first[2])
            self.started.append(first[2])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.running))))

    def end(self, name: str) -> None:
        self.queue.finish(name)
        self.running.remove(name)

    @rule(reason=st.sampled_from(["asleep", "paused"]), on=st.booleans())
    def hold(self, reason: str, on: bool) -> None:
        (self.queue.hold if on else self.queue.release)(reason)
        (self.holds.add if on else self.holds.discard)(reason)

    @rule(mode=st.sampled_from(OnUpdate))
    def begin_update(self, mode: OnUpdate) -> None:
        version = next(self.versions)
        waits = mode is OnUpdate.DRAIN and len(self.running) > 0
        assert self.queue.begin_update(make_update(version), mode) != waits
        self.draining = version if waits else None

    @rule()
    def take_drained(self) -> None:
        update = self.queue.take_drained()
        due = self.draining is not None and not self.running
        assert (None if update is None else update.version) == (self.draining if due else None)
        if due:
            self.draining = None

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert set(self.queue.running) == self.running and len(self.running) <= CAPACITY
        assert all((name in self.queue) == (name in self.known()) for name in (f"r{number}" for number in range(8)))
        work = bool(self.known()) and not self.holds
        assert self.queue.busy == (work or self.draining is not None)
        assert self.engine.started == self.started and self.engine.stopped == self.stopped
        assert [delta.request for delta in self.engine.deltas] == self.aborted
        assert all(delta.finish is FinishReason.ABORT and not len(delta.tokens) for delta in self.engine.deltas)


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase


@pytest.mark.parametrize("seed", range(20))
def test_long_lives_agree_with_the_model(seed):
    """The same model over hundreds of calls: a machine of hypothesis seldom sees the end of a drain."""
    draw, machine, drained = random.Random(seed), QueueMachine(), 0
    for _ in range(1500):
        name = f"r{draw.randrange(8)}"
        match draw.choices(range(7), [6, 1, 6, 4, 1, 0.5, 4])[0]:
            case 0:
                machine.add(name, draw.randint(-1, 1))
            case 1:
                machine.abort(name)
            case 2:
                machine.admit()
            case 3 if machine.running:
                machine.end(draw.choice(sorted(machine.running)))
            case 4:
                machine.hold(draw.choice(["asleep", "paused"]), on=draw.random() < 0.2)
            case 5:
                machine.begin_update(draw.choice(list(OnUpdate)))
            case 6:
                drained += machine.draining is not None and not machine.running
                machine.take_drained()
        machine.agrees_with_the_model()
    assert drained and len(machine.started) > 100


@pytest.mark.parametrize(
    ("mode", "sampled", "cached", "expected"),
    [
        (OnUpdate.KEEP, True, True, Continuation.KEEP_CACHE),
        (OnUpdate.KEEP, False, True, Continuation.KEEP_CACHE),
        (OnUpdate.KEEP, False, False, Continuation.RECOMPUTE),
        (OnUpdate.RECOMPUTE, True, True, Continuation.RECOMPUTE),
        (OnUpdate.RECOMPUTE, False, False, Continuation.RECOMPUTE),
        (OnUpdate.RESTART, True, True, Continuation.RESTART),
        (OnUpdate.RESTART, False, True, Continuation.RECOMPUTE),
    ],
)
def test_update_mode_decides_how_requests_continue(mode, sampled, cached, expected):
    assert choose_continuation(mode, Progress(sampled=sampled, cached=cached)) is expected


@pytest.mark.parametrize(
    ("mode", "sampled", "expected"),
    [
        (OnUpdate.KEEP, True, Continuation.KEEP_CACHE),
        (OnUpdate.RECOMPUTE, True, Continuation.RESTART),
        (OnUpdate.RECOMPUTE, False, Continuation.RECOMPUTE),
        (OnUpdate.RESTART, True, Continuation.RESTART),
    ],
)
def test_requests_that_cannot_resume_restart(mode, sampled, expected):
    assert choose_continuation(mode, Progress(sampled=sampled, cached=sampled, resumable=False)) is expected


def test_only_running_requests_announce_a_restart():
    engine = Engine(capacity=2)
    for name in ("sampled", "unsampled", "queued"):
        engine.queue.add(make_request(name))
    engine.queue.admit()
    assert engine.queue.begin_update(make_update(1), OnUpdate.RESTART)
    found = dict(engine.queue.continue_running(OnUpdate.RESTART, lambda name: Progress(name == "sampled", True)))
    assert found == {"sampled": Continuation.RESTART, "unsampled": Continuation.RECOMPUTE}
    assert [(delta.request, delta.restarted, delta.finish) for delta in engine.deltas] == [("sampled", True, None)]


def test_cleared_queue_ends_without_deltas():
    engine = Engine(capacity=1)
    for name in ("running", "queued"):
        engine.queue.add(make_request(name))
    engine.queue.admit()
    engine.queue.clear()
    engine.queue.admit()
    assert engine.started == ["running"] and not engine.queue.busy and not engine.deltas and not engine.stopped
