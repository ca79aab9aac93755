"""Whole runs in virtual time."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from antiphon.cli import app
from antiphon.config import load
from antiphon.simulate.engine import EngineSpeed
from antiphon.simulate.parts import LearnerSpeed
from antiphon.simulate.scenario import EnginesConfig, ScenarioConfig, simulate
from antiphon.simulate.workloads import DistributionConfig


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
