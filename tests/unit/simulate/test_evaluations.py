"""Evaluations beside training, in virtual time: the learner goes on, few slots are taken, versions are told."""

import io
import json

import pytest

from antiphon.simulate.engine_speed import EngineSpeed
from antiphon.simulate.invariants import InvariantChecker
from antiphon.simulate.learner import LearnerSpeed
from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import EnginesConfig, ScenarioConfig
from antiphon.simulate.workloads import DistributionConfig

STEPS, EVERY = 9, 3


def evaluated(evaluation, rollout=None, **changes):
    """Simulate a run that evaluates every three steps; return its outcome and events."""
    settings = {"groups_per_step": 4, "group_size": 4, "async_ratio": 1.0, "sampling": {"max_tokens": 4000}}
    settings |= rollout or {}
    speed = EngineSpeed(slots=8, iteration=0.02, load=1.0)
    scenario = ScenarioConfig(
        **{
            "steps": STEPS,
            "rollout": settings,
            "engines": EnginesConfig(count=2, speed=speed),
            "learner": LearnerSpeed(step=5.0, publish=0.5),
            "response_tokens": DistributionConfig(kind="lognormal", mean=300, spread=0.8),
            "test_prompts": 8,
            "evaluation": {"every": EVERY, **evaluation},
        }
        | changes
    )
    sink = io.StringIO()
    outcome = simulate(scenario, sink)
    lines = sink.getvalue().splitlines()
    checker = InvariantChecker(scenario.rollout)
    checker.check(lines)
    checker.check_end(STEPS)
    return outcome, [json.loads(line) for line in lines]


def spans(events):
    """Return begin, end and fields of each evaluation; no two may overlap."""
    found = []
    for event in events:
        if event["event"] == "evaluate":
            assert not found or "last" in found[-1][2], "two evaluations at once"
            found.append((event["t"], None, event))
        elif event["event"] == "evaluated":
            began, _, begin = found[-1]
            assert event["step"] == begin["step"] and event["first"] == begin["version"]
            found[-1] = (began, event["t"], event)
    return found


def most_at_once(events):
    """Return the greatest number of requests of evaluations that engines had at once while training went on."""
    running, most, beside = 0, 0, False
    for event in events:
        if event["event"] == "evaluate":
            beside = 0 < event["step"] < STEPS
        if event.get("request", "").startswith("-"):
            running += {"place": 1, "served": -1}[event["event"]]
            most = max(most, running if beside else 0)
    return most


def test_training_goes_on_while_an_evaluation_runs():
    outcome, events = evaluated({"concurrency": 3})
    before, *beside, after = spans(events)
    assert [each["step"] for _, _, each in beside] == [3, 6]
    assert [(each["step"], each["first"], each["last"]) for _, _, each in (before, after)] == [(0, 0, 0), (9, 9, 9)]
    published = [event["t"] for event in events if event["event"] == "publish"]
    for began, ended, fields in beside:
        newest = fields["step"] + sum(began < second < ended for second in published)
        assert fields["step"] < fields["last"] <= newest
    assert most_at_once(events) == 3
    shown = [step for step in outcome.steps if "evaluation/accuracy" in step]
    assert [step["evaluation/first_version"] for step in shown] == [3, 6]
    assert [step["evaluation/last_version"] for step in shown] == [fields["last"] for *_, fields in beside]
    assert [step["evaluation/accuracy"] for step in shown] == [fields["accuracy"] for *_, fields in beside]
    assert shown[0]["evaluation/wait_seconds"] == 0


def test_blocking_evaluations_measure_one_version_and_cost_time():
    blocking, events = evaluated({"blocking": True})
    found = spans(events)
    assert [(each["step"], each["first"], each["last"]) for *_, each in found] == [(n, n, n) for n in (0, 3, 6, 9)]
    waits = [step["evaluation/wait_seconds"] for step in blocking.steps if "evaluation/accuracy" in step]
    assert waits == pytest.approx([ended - began for began, ended, _ in found[1:-1]]) and min(waits) > 0
    beside, _ = evaluated({"concurrency": 3})
    assert beside.summary["train_seconds"] < blocking.summary["train_seconds"]


def test_deterministic_runs_evaluate_between_two_steps():
    outcome, events = evaluated({}, rollout={"deterministic": True})
    assert [(each["first"], each["last"]) for *_, each in spans(events)] == [(n, n) for n in (0, 3, 6, 9)]
    assert [number for number, step in enumerate(outcome.steps, 1) if "evaluation/accuracy" in step] == [3, 6]


def test_slow_evaluation_leaves_out_the_next_and_is_waited_for_at_the_end():
    outcome, events = evaluated({"concurrency": 1}, test_prompts=60)
    assert [each["step"] for *_, each in spans(events)] == [0, 3, 9]
    last = outcome.steps[-1]
    assert last["evaluation/first_version"] == 3 and last["evaluation/wait_seconds"] > 0
    assert [step for step in outcome.steps if "evaluation/accuracy" in step] == [last]


@pytest.mark.parametrize("on_update", ["keep", "recompute", "restart", "drain"])
def test_engines_that_sleep_while_the_learner_trains_evaluate_too(on_update):
    engines = EnginesConfig(count=2, lent=2, speed=EngineSpeed(slots=8, iteration=0.02, load=1.0))
    _, events = evaluated({"concurrency": 4}, {"on_update": on_update}, engines=engines)
    began, ended, fields = spans(events)[1]
    slept = [event["t"] for event in events if event["event"] == "sleep"]
    assert fields["step"] == 3 and any(began < second < ended for second in slept)


def test_lost_engine_loses_nothing_of_an_evaluation():
    _, (began, *_), *_ = spans(evaluated({"concurrency": 3})[1])
    _, events = evaluated({"concurrency": 3}, faults=({"point": "engine.crash", "at": began + 1.0},))
    (lost,) = [event["t"] for event in events if event["event"] == "lost"]
    _, (began, ended, fields), *_ = spans(events)
    assert began < lost < ended and fields["step"] == 3


@pytest.mark.parametrize("pinned", [False, True])
def test_default_is_a_quarter_of_the_slots(pinned):
    rollout = {"placement": "pinned"} if pinned else {}
    scenario = {"groups_per_step": 4, "group_size": 4, "sampling": {"max_tokens": 10}} | rollout
    config = ScenarioConfig(rollout=scenario, engines={"count": 2}).run_config("/nowhere")
    engine = config.engine.model_copy(update={"replicas": 3, "slots": 16})
    assert config.model_copy(update={"engine": engine}).evaluation_attempts == (3 if pinned else 12)
