"""Failures that users of such systems have met, as scenarios in virtual time that must end well.

Each names where it was met: prime-rl 2912, NeMo-RL 3599, prime-rl 2230, rllm 710 and Gym 1351, tinker-cookbook 822.
"""

import io
import json
from collections import Counter

import pytest

from antiphon.core.errors import StallError
from antiphon.simulate.invariants import InvariantChecker
from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import ScenarioConfig
from tests.raising import raises_with


def scenario(**changes):
    rollout = {"groups_per_step": 4, "group_size": 4, "sampling": {"max_tokens": 4000}} | changes.pop("rollout", {})
    return ScenarioConfig.model_validate(
        {
            "steps": 12,
            "rollout": rollout,
            "engines": {"count": 3, "speed": {"slots": 8, "iteration": 0.02, "load": 0.5}},
            "learner": {"step": 2.0},
            "response_tokens": {"kind": "lognormal", "mean": 200, "spread": 1.0, "shared": 0.5},
        }
        | changes
    )


def played(config):
    """Simulate a scenario, check its events, and return both."""
    log = io.StringIO()
    outcome = simulate(config, log)
    checker = InvariantChecker(config.rollout)
    checker.check(log.getvalue().splitlines())
    checker.check_end(config.steps)
    return outcome, [json.loads(line) for line in log.getvalue().splitlines()]


@pytest.mark.parametrize("policy", ["queue", "batch", "tail_batching"])
def test_no_deadlock_at_the_tail(policy):
    """The last requests of a step sit on an engine that dies, while nothing else is left to do."""
    rollout = {"policy": policy, "async_ratio": 0.0}
    if policy == "tail_batching":
        rollout |= {"extra_groups": 2, "order": "ready"}
    crash = {"point": "engine.crash", "at": 3.0, "every": 30.0}
    outcome, events = played(scenario(rollout=rollout, faults=[crash], engines={"count": 4, "start_seconds": 20.0}))
    assert outcome.summary["steps"] == 12
    assert any(event["event"] == "lost" for event in events)


def test_each_prompt_is_trained_on_once_an_epoch():
    """Crashes and restarts, more prompts in flight than a step takes, a ratio that is not whole."""
    config = scenario(
        prompts=12,
        rollout={"async_ratio": 1.5, "engine_restarts": 20},
        faults=[{"point": "engine.crash", "at": 5.0, "every": 40.0}, {"point": "engine.load", "chance": 0.1}],
    )
    _, events = played(config)
    prompts = {event["group"]: event["prompt"] for event in events if event["event"] == "admit"}
    trained = [prompts[group] for event in events if event["event"] == "take" for group in event["groups"]]
    assert len(trained) == 12 * 4 == 4 * 12
    assert set(Counter(trained).values()) == {4}, "four epochs of twelve prompts, each once an epoch"
    for epoch in range(4):
        assert len(set(trained[12 * epoch : 12 * epoch + 12])) == 12


def test_whoever_is_silent_is_given_up_within_its_deadline():
    """Engines and worlds that never answer: the run goes on, no later than what was said."""
    outcome, events = played(
        scenario(
            rollout={"engine_timeout": 15.0, "environment_timeout": 10.0, "max_turns": 4},
            environment={"turns": {"mean": 3}},
            faults=[
                {"point": "engine.hang", "at": 10.0, "every": 200.0},
                {"point": "environment.hang", "chance": 0.02},
            ],
        )
    )
    assert outcome.summary["steps"] == 12
    hangs = [event["t"] for event in events if event["event"] == "fault" and event["point"] == "engine.hang"]
    losses = [event["t"] for event in events if event["event"] == "lost"]
    assert losses and losses[0] - hangs[0] <= 15.0 * 1.25 + 15.0


def test_a_run_that_cannot_go_on_says_who_waits_for_whom():
    """All engines slower than any deadline. And what happened last: these groups were let in, and sent to the engine."""
    slow = {"point": "engine.slow", "at": 1.0, "factor": 1e6}
    with raises_with(StallError, match="learner waits for groups", key="rollout.timeout") as stall:
        simulate(scenario(rollout={"timeout": 300.0}, engines={"count": 1}, faults=[slow]))
    last = [json.loads(line) for line in str(stall.value).split("What happened last:\n")[1].splitlines()]
    assert [event["t"] for event in last] == sorted(event["t"] for event in last)
    assert {"place", "fault"} <= {event["event"] for event in last}


def test_a_failure_of_the_machinery_is_never_a_reward():
    """Every answer is right, while graders are lost and worlds break: nothing that is trained on may say otherwise."""
    outcome, _ = played(
        scenario(
            rollout={"max_turns": 4, "environment_timeout": 10.0},
            environment={"turns": {"mean": 2}},
            success={"mean": 1.0},
            faults=[
                {"point": "reward.lost", "chance": 0.1},
                {"point": "environment.fail", "chance": 0.05},
                {"point": "environment.hang", "chance": 0.02},
            ],
        )
    )
    assert {step["reward/mean"] for step in outcome.steps} == {1.0}
    assert outcome.steps[-1]["drops/failed"] > 10


@pytest.mark.parametrize(
    ("changes", "all_trained"),
    [
        ({"order": "ready", "extra_groups": 4, "async_ratio": 0.0}, False),
        ({"order": "ready", "extra_groups": 4, "async_ratio": 1.0, "on_expiry": "wait"}, True),
        ({"policy": "tail_batching", "order": "ready", "extra_groups": 4, "async_ratio": 0.0}, True),
        ({"order": "fifo", "async_ratio": 1.0}, True),
    ],
    ids=["first to finish", "waiting for what is due", "tail batching", "first in, first out"],
)
def test_slow_tasks_are_trained_on_or_the_meter_says_so(changes, all_trained):
    """Ten prompts, some of which always get long answers; first-to-finish schedules never train on those."""
    outcome, _ = played(
        scenario(
            steps=40,
            prompts=10,
            rollout=changes,
            response_tokens={"kind": "lognormal", "mean": 300, "spread": 1.5, "shared": 0.98, "maximum": 4000},
        )
    )
    never = outcome.steps[-1]["bias/prompts_never_trained"]
    assert (never == 0) == all_trained, never
    assert (outcome.steps[-1]["bias/length"] < -0.02) == (not all_trained)
