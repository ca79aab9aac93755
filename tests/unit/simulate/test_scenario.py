"""Whole runs in virtual time."""

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from antiphon.cli.app import app
from antiphon.core.config import load
from antiphon.core.errors import ConfigError, RolloutError, StallError
from antiphon.core.rng import derive
from antiphon.learning.config import LearnerConfig
from antiphon.simulate.engine_speed import EngineSpeed
from antiphon.simulate.invariants import InvariantChecker
from antiphon.simulate.learner import LearnerSpeed
from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import EnginesConfig, ScenarioConfig
from antiphon.simulate.workloads import DistributionConfig
from tests.raising import raises_with


def scenario(**changes):
    rollout = {"groups_per_step": 4, "group_size": 4, "async_ratio": 1.0, "sampling": {"max_tokens": 4000}}
    rollout |= changes.pop("rollout", {})
    settings = {
        "steps": 8,
        "rollout": rollout,
        "engines": EnginesConfig(count=2, speed=EngineSpeed(slots=8, iteration=0.02, prefill=1e-4, load=1.0)),
        "learner": LearnerSpeed(step=5.0, publish=0.5),
        "response_tokens": DistributionConfig(kind="lognormal", mean=300, spread=0.8),
    }
    return ScenarioConfig(**(settings | changes))


def test_one_seed_one_execution():
    assert simulate(scenario(seed=3)) == simulate(scenario(seed=3))
    assert simulate(scenario(seed=3)).steps != simulate(scenario(seed=4)).steps


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, 2.0])
def test_what_is_trained_on_is_fresh(ratio):
    outcome = simulate(scenario(rollout={"async_ratio": ratio}))
    assert outcome.summary["steps"] == 8
    assert max(step["age/max"] for step in outcome.steps) <= -(-ratio // 1)


def test_overlap_hides_the_shorter_phase():
    synchronous = simulate(scenario(rollout={"async_ratio": 0})).summary["train_seconds"]
    overlapping = simulate(scenario(rollout={"async_ratio": 1})).summary["train_seconds"]
    assert overlapping < synchronous


def test_rare_updates_save_the_time_of_publishing():
    slow = {"learner": LearnerSpeed(step=5.0, publish=30.0), "rollout": {"async_ratio": 3}, "steps": 9}
    logs, seconds = {every: io.StringIO() for every in (1, 3)}, {}
    for every, log in logs.items():
        outcome = simulate(scenario(weights={"every": every}, **slow), log)
        seconds[every] = outcome.summary["train_seconds"]
        assert max(step["age/max"] for step in outcome.steps) <= 3
        checker = InvariantChecker(scenario(**slow).rollout)
        checker.check(log.getvalue().splitlines())
        checker.check_end(steps=9)
        assert set(checker.engines.values()) == {9}
    assert seconds[3] < 0.7 * seconds[1]
    updates = [json.loads(line) for line in logs[3].getvalue().splitlines()]
    assert [event["version"] for event in updates if event["event"] == "update"] == [3, 6, 9]


SLOW_ENGINES = ({"point": "engine.slow", "at": 1.0, "factor": 1e6},)


def engines(load, lent=0):
    return EnginesConfig(count=2, lent=lent, speed=EngineSpeed(slots=8, iteration=0.02, load=load))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"learner": LearnerSpeed(step=5000)}, None),
        ({"learner": LearnerSpeed(step=5000), "engines": engines(load=1, lent=2)}, None),
        ({"learner": LearnerSpeed(step=20000)}, "learner.timeout"),
        ({"learner": LearnerSpeed(step=2000), "training": LearnerConfig(timeout=1000)}, "learner.timeout"),
        ({"learner": LearnerSpeed(publish=2000)}, None),
        ({"learner": LearnerSpeed(publish=5000)}, "weights.timeout"),
        ({"engines": engines(load=2000), "rollout": {"async_ratio": 0}}, None),
        ({"engines": engines(load=5000), "rollout": {"async_ratio": 0}}, "weights.timeout"),
        ({"faults": SLOW_ENGINES}, "rollout.timeout"),
    ],
    ids=["step", "shared", "long step", "given", "publish", "long publish", "load", "long load", "groups"],
)
def test_each_kind_of_wait_has_a_deadline_of_its_own(changes, key):
    """In virtual seconds. All requests are done 600 s after they can begin, or never."""
    played = scenario(steps=3, **changes)
    if key is None:
        assert simulate(played).summary["steps"] == 3
    else:
        with raises_with(StallError, match=key, key=key):
            simulate(played)


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[3].glob("scenarios/*.yaml")), ids=lambda path: path.stem)
def test_the_scenarios_of_the_repository_load(path):
    assert load(path, model=ScenarioConfig).name == path.stem


def test_the_command_prints_what_it_came_to(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(
        "steps: 3\nrollout: {groups_per_step: 2, group_size: 2, sampling: {max_tokens: 500}}\nengines: {count: 2}\n"
    )
    result = CliRunner().invoke(app, ["simulate", str(path), "rollout.async_ratio=0"])
    assert result.exit_code == 0, result.output
    assert "seconds a step" in result.output and "preemptions" in result.output
    broken = CliRunner().invoke(app, ["simulate", str(path), "engines.speed.slot=4"])
    assert broken.exit_code == 2 and "slots" in broken.output


SHORTEST = '''
import asyncio

async def shortest(group):
    """Play twice as many as are needed and use the shortest."""
    played = await asyncio.gather(*(group.generate(temperature=0.7) for _ in range(2 * group.expected)))
    played.sort(key=lambda each: each.completion_tokens)
    for each in played[group.expected :]:
        group.abort(each)
    for each in played[: group.expected]:
        assert each.transcript.turns[0].sampling.temperature == 0.7
        await group.reward(each)

async def first(group):
    """Never stop by itself."""
    async def one():
        await group.reward(await group.generate())
    await asyncio.gather(*(one() for _ in range(3 * group.expected)), asyncio.Event().wait())

async def too_few(group):
    await group.reward(await group.generate())

async def truncated(group):
    await group.generate(top_p=0.9)

async def penalized(group):
    await group.generate(repetition_penalty=1.1)

async def beams(group):
    await group.generate(num_beams=2)
'''


@pytest.fixture
def own_loops(tmp_path, monkeypatch):
    (tmp_path / "own_loops.py").write_text(SHORTEST)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("name", "share"), [("shortest", 0.5), ("first", 1 / 3)])
def test_a_sampling_loop_of_ones_own(own_loops, name, share):
    log = io.StringIO()
    outcome = simulate(scenario(rollout={"sampler": f"own_loops:{name}"}), log)
    ordinary = simulate(scenario())
    assert outcome.summary["steps"] == 8
    checker = InvariantChecker(scenario().rollout)
    checker.check(log.getvalue().splitlines())
    checker.check_end(steps=8)
    ended = Counter(status for status in checker.status.values())
    assert ended["trained"] == 8 * 4 * 4
    assert ended["trained"] / len(checker.status) <= share + 0.1
    assert outcome.steps[-1]["length/mean"] < ordinary.steps[-1]["length/mean"]


def test_a_sampling_loop_that_gives_too_little_fails_the_run(own_loops):
    with pytest.raises(RolloutError, match="the last 4 groups failed"):
        simulate(scenario(rollout={"sampler": "own_loops:too_few"}))


@pytest.mark.parametrize("name", ["truncated", "penalized", "beams"])
def test_a_loop_cannot_sample_what_training_cannot_use(own_loops, name):
    """Truncated without a recorded support, or from another distribution."""
    with raises_with(ConfigError, key="rollout.sampler"):
        simulate(scenario(rollout={"sampler": f"own_loops:{name}"}))


def test_slow_environments_delay_those_in_lock_step():
    world = {"step_seconds": {"kind": "uniform", "mean": 5, "spread": 5}, "turns": {"mean": 4}}
    agents = {"max_turns": 8, "async_ratio": 0, "sampling": {"max_tokens": 100}}
    free = simulate(scenario(rollout=agents, environment=world))
    together = simulate(scenario(rollout=agents, environment=world | {"lock_step": True}))
    assert free.summary["train_seconds"] < 0.9 * together.summary["train_seconds"]
    assert free.steps[-1]["attempts/dispatched"] == 8 * 16


def test_hung_environment_fails_its_attempt():
    world = {"turns": {"mean": 3}}
    outcome = simulate(
        scenario(
            rollout={"max_turns": 4, "environment_timeout": 20},
            environment=world,
            faults=[{"point": "environment.hang", "chance": 0.05}],
        )
    )
    assert outcome.summary["steps"] == 8
    assert outcome.steps[-1]["drops/failed"] > 0
    assert outcome.steps[-1]["bias/prompts_never_trained"] < 0.5


def test_correlation_of_responses_is_as_configured():
    def correlation(shared):
        lengths = DistributionConfig(kind="lognormal", mean=100, spread=1.0, shared=shared)
        pairs = np.log(
            [
                [lengths.draw_correlated(thing, seed) for seed in (2 * thing + 10**6, 2 * thing + 1 + 10**6)]
                for thing in map(derive, range(4000))
            ]
        )
        return np.corrcoef(pairs.T)[0, 1]

    assert correlation(0.0) == pytest.approx(0.0, abs=0.05)
    assert correlation(0.6) == pytest.approx(0.6, abs=0.05)


def test_the_command_writes_events_and_a_picture(tmp_path):
    path, events, trace = tmp_path / "small.yaml", tmp_path / "events.jsonl", tmp_path / "trace.json"
    path.write_text("steps: 2\nrollout: {groups_per_step: 2, group_size: 2, sampling: {max_tokens: 50}}\n")
    for _ in range(2):
        arguments = ["simulate", str(path), "--trace", str(trace), "--events", str(events)]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert json.loads(trace.read_text())["traceEvents"]
    assert [json.loads(line)["event"] for line in events.read_text().splitlines()].count("publish") == 2
