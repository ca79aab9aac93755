"""Runs with faults keep the promises; the checker that says so is not blind."""

import io
import json

import pytest
from typer.testing import CliRunner

from antiphon.cli.app import app
from antiphon.record.events import to_trace
from antiphon.rollout.config import RolloutConfig
from antiphon.simulate.chaos import run_seed
from antiphon.simulate.chaos_scenario import draw_scenario
from antiphon.simulate.invariants import InvariantChecker, InvariantError

SEEDS = 20  # a thousand in benchmarks/simulation.py


@pytest.mark.parametrize("seed", range(SEEDS))
def test_invariants_hold(seed):
    run_seed(seed, io.StringIO())


def test_one_seed_one_log():
    first, second = io.StringIO(), io.StringIO()
    assert run_seed(7, first) == run_seed(7, second)
    assert first.getvalue() == second.getvalue() != ""


def test_scenarios_are_of_many_kinds():
    scenarios = [draw_scenario(seed) for seed in range(200)]
    assert {s.rollout.policy for s in scenarios} == {"queue", "batch", "one_step_off", "tail_batching"}
    assert {s.rollout.on_update for s in scenarios} == {"keep", "recompute", "restart", "drain"}
    assert len({fault.point for s in scenarios for fault in s.faults}) == 9


def test_command_counts_endings():
    result = CliRunner().invoke(app, ["simulate", "--chaos", "3"])
    assert result.exit_code == 0 and "done" in result.output


CONFIG = RolloutConfig(groups_per_step=1, group_size=1, async_ratio=1, sampling={"max_tokens": 8})
START = [
    {"event": "join", "engine": 0, "version": 0},
    {"event": "attempt", "attempt": "0.0.0", "status": "running"},
    {"event": "admit", "group": 0, "prompt": "p"},
]
DONE = {"event": "attempt", "attempt": "0.0.0", "status": "finished"}
TAKE = {"event": "take", "groups": [0]}
TRAINED = {"event": "attempt", "attempt": "0.0.0", "status": "trained"}
PUBLISH = {"event": "publish", "version": 1}


def read(*events):
    checker = InvariantChecker(CONFIG)
    checker.check(json.dumps({"t": 0.0, **event}) for event in [*START, *events])
    return checker


def test_checker_accepts_a_valid_run():
    read(DONE, TAKE, TRAINED, PUBLISH).check_end(steps=1)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([START[1]], "started twice"),
        ([TAKE], "wrong size"),
        ([DONE, TRAINED], "outside a step"),
        ([DONE, TAKE, PUBLISH], "attempts lost"),
        ([DONE, TAKE, TRAINED, PUBLISH, TRAINED], "trained became trained"),
        ([DONE, TAKE, TRAINED, {"event": "publish", "version": 2}], "published as number 1"),
        ([{"event": "load", "engine": 0, "version": 1}], "not the next"),
        ([{"event": "lost", "engine": 0}, {"event": "place", "request": "0.0.0/0", "engine": 0}], "gone"),
        ([DONE, {"event": "place", "request": "0.0.0/0", "engine": 0}], "an attempt that is finished"),
        ([{"event": "served", "request": "0.0.0/0", "versions": [0, 1]}], "not published"),
    ],
)
def test_books_of_bad_runs(events, message):
    with pytest.raises(InvariantError, match=message):
        read(*events)


def test_an_attempt_that_never_ends_is_found():
    with pytest.raises(InvariantError, match="never ended"):
        read().check_end(steps=0)


def test_a_picture_of_a_run():
    log = io.StringIO()
    run_seed(3, log)
    trace = to_trace(log.getvalue().splitlines())["traceEvents"]
    begun, ended = ([event["id"] for event in trace if event["ph"] == phase] for phase in "be")
    assert begun == ended and len(begun) > 10
    assert {event["pid"] for event in trace} >= {"learner", "engine 0", "attempts"}
