"""Plans: the closed form, predictions, and a probe that finds again what a simulation was made of."""

import io
import random
import statistics
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config import Config, dump, load
from antiphon.core.errors import ConfigError
from antiphon.learning.mesh_config import MeshConfig
from antiphon.record.timeline import Timeline
from antiphon.run.config import RunConfig
from antiphon.simulate.closed_form import ClosedForm, solve_learner_share
from antiphon.simulate.device_split import iterate_splits
from antiphon.simulate.engine_speed import EngineSpeed
from antiphon.simulate.estimators import estimate_correlation, fit_nonnegative, shrink_success_rates
from antiphon.simulate.learner import LearnerSpeed
from antiphon.simulate.planner import make_scenario, predict
from antiphon.simulate.probe_fit import fit
from antiphon.simulate.probe_phases import Phase, make_phases
from antiphon.simulate.run import simulate
from antiphon.simulate.speeds import Speeds, make_trace
from antiphon.simulate.workloads import DistributionConfig
from tests.raising import raises_with

positive = st.floats(1e-3, 1e3)


def config(**rollout) -> RunConfig:
    schedule = {"groups_per_step": 8, "group_size": 4, "async_ratio": 1.0, "sampling": {"max_tokens": 2000}}
    return RunConfig.model_validate(
        {
            "name": "planned",
            "steps": 10,
            "model": {"path": "model"},
            "tasks": [{"name": "task", "prompts": {"source": "jsonl", "path": "x"}}],
            "rollout": schedule | rollout,
            "engine": {"slots": 16, "replicas": 2},
        }
    )


SPEEDS = Speeds(
    engine=EngineSpeed(iteration=0.02, per_sequence=0.001, prefill=0.001, load=0.5),
    learner=LearnerSpeed(step=1.0, per_token=0.001),
    prompt_tokens=DistributionConfig(mean=50),
    response_tokens=DistributionConfig(kind="lognormal", mean=200, spread=0.5, shared=0.4),
    success=DistributionConfig(kind="uniform", mean=0.5, spread=0.4),
)


@given(a=positive, b=positive, c=positive)
def test_the_best_share_balances_both_sides(a, b, c):
    share = solve_learner_share(a, b, c)
    assert 0 < share < 1
    assert b / share == pytest.approx(a / (1 - share) + c, rel=1e-6)
    assert share > b / (a + b + c) - 1e-12, "the published share stays below the balance point"


def test_without_a_longest_answer_shares_are_as_the_work():
    assert solve_learner_share(3.0, 1.0, 0.0) == 0.25


def test_a_step_of_constant_lengths_takes_what_arithmetic_says():
    speeds = SPEEDS.model_copy(
        update={
            "engine": EngineSpeed(iteration=0.01),
            "response_tokens": DistributionConfig(mean=100),
            "learner": LearnerSpeed(step=3.0),
        }
    )
    plan = predict(config(async_ratio=0.0), speeds)
    one_iteration = 0.01 / 4  # that those wait who come while one is under way
    assert plan.step_seconds == pytest.approx(100 * 0.01 + 3.0, rel=one_iteration)
    assert plan.learner_idle == pytest.approx(1 / 4, abs=one_iteration)
    assert plan.engines_idle == pytest.approx(3 / 4, abs=one_iteration)
    assert plan.ages == {0: 1.0}
    overlapped = predict(config(async_ratio=1.0), speeds)
    assert overlapped.step_seconds == pytest.approx(3.0)
    assert overlapped.ages == {0: 0.0, 1: 1.0}


def test_sharing_a_machine_slows_both_while_both_work():
    speeds = SPEEDS.model_copy(
        update={
            "engine": EngineSpeed(iteration=0.01, beside_learner=1.5),
            "response_tokens": DistributionConfig(mean=1000),
            "learner": LearnerSpeed(step=3.0, beside_engines=2.0),
        }
    )
    assert predict(config(async_ratio=0.0), speeds).step_seconds == pytest.approx(10.0 + 3.0, rel=0.01), "in turns"
    events = io.StringIO()
    simulate(make_scenario(config(async_ratio=1.0), speeds, attempts=100), events)
    timeline = Timeline.read(events.getvalue().splitlines())
    assert timeline.steps[0] == pytest.approx((10.0, 16.0), abs=0.05)
    # In the 6 s that the learner takes, engines do the work of 4.
    assert any((r.placed, r.served) == pytest.approx((10.0, 22.0), abs=0.05) for r in timeline.served)


@pytest.mark.parametrize("ratio", [0.0, 1.0, 2.0])
def test_the_closed_form_bounds_the_simulation(ratio):
    plan = predict(config(async_ratio=ratio), SPEEDS)
    assert plan.step_seconds <= plan.bound


def test_more_devices_are_divided_by_what_is_fastest():
    speeds = SPEEDS.model_copy(update={"learner": LearnerSpeed(step=1.0, per_token=0.01)})
    found = list(iterate_splits(config(group_size=2), speeds, 8))
    assert str(found[0]) == "all generate and train in turns"
    divided = [split for split in found if not split.shared]
    assert all(split.learners + split.engines == 8 for split in divided)
    assert [split.learners for split in found if split.shared and split.engines == 8 > split.learners] == [
        split.learners for split in divided
    ]
    best = min(divided, key=lambda split: split.seconds)
    tried = {split.learners for split in divided}
    assert min(tried) < best.learners < max(tried), "more and fewer were tried"


def test_a_probe_finds_what_a_simulation_was_made_of(monkeypatch):
    groups = []
    module = types.ModuleType("onlooker")
    module.look = lambda group: groups.append(group) or True
    monkeypatch.setitem(sys.modules, "onlooker", module)
    truth = SPEEDS.model_copy(
        update={
            "engine": SPEEDS.engine.model_copy(update={"beside_learner": 1.4}),
            "learner": SPEEDS.learner.model_copy(update={"beside_engines": 1.7}),
            "reward_seconds": DistributionConfig(kind="uniform", mean=0.3, spread=0.1),
        }
    )
    base, phases = config(), []
    for phase in make_phases(base):
        watched = phase.model_copy(update={"rollout": phase.rollout.model_copy(update={"filter": "onlooker:look"})})
        events = io.StringIO()
        outcome = simulate(make_scenario(watched, truth), events)
        tokens = [step["learner/tokens"] for step in outcome.steps]
        phases.append(Phase(Timeline.read(events.getvalue().splitlines()), tokens))
    found = fit(base, phases, groups)
    assert found.learner.step == pytest.approx(1.0, rel=0.02)
    assert found.learner.per_token == pytest.approx(0.001, rel=0.02)
    assert found.learner.beside_engines == pytest.approx(1.7, rel=0.1)
    assert found.engine.beside_learner == pytest.approx(1.4, rel=0.15)
    assert found.engine.load == pytest.approx(0.5)
    assert found.reward_seconds.quantile(0.5) == pytest.approx(0.3, rel=0.1)
    assert found.prompt_tokens.quantile(0.5) == 50
    assert found.response_tokens.quantile(0.5) == pytest.approx(200 * 0.88, rel=0.1)
    assert 0.2 < found.response_tokens.shared < 0.6
    for ratio in (0.0, 2.0):
        other = config(async_ratio=ratio, groups_per_step=12, group_size=3)
        foretold, real = predict(other, found), predict(other, truth)
        assert foretold.step_seconds == pytest.approx(real.step_seconds, rel=0.08)
        assert foretold.learner_idle == pytest.approx(real.learner_idle, abs=0.05)
        assert foretold.engines_idle == pytest.approx(real.engines_idle, abs=0.05)


@given(st.lists(positive, min_size=3, max_size=3), st.integers(0, 1000))
def test_least_squares_finds_coefficients_that_are_not_negative(truth, seed):
    chance = random.Random(seed)
    rows = [[chance.uniform(0.1, 10) for _ in truth] for _ in range(12)]
    values = [sum(a * b for a, b in zip(row, truth, strict=True)) for row in rows]
    assert fit_nonnegative(rows, values) == pytest.approx(truth, rel=1e-6)
    noisy = [value * chance.uniform(0.5, 2) for value in values]
    assert min(fit_nonnegative(rows, noisy)) >= 0


def test_likeness_of_siblings():
    chance = random.Random(0)
    alike = [[number] * 4 for number in range(10)]
    unlike = [[chance.random() for _ in range(4)] for _ in range(400)]
    assert estimate_correlation(alike) == 1.0
    assert estimate_correlation(unlike) < 0.1
    assert estimate_correlation([[1, 2]]) == 0.0


def test_chances_behind_scores_lie_closer_than_the_means():
    chance = random.Random(0)
    truth = [chance.uniform(0.2, 0.8) for _ in range(2000)]
    scores = [[float(chance.random() < probability) for _ in range(4)] for probability in truth]
    found = shrink_success_rates(scores)
    assert statistics.fmean(found) == pytest.approx(0.5, abs=0.02)
    assert statistics.stdev(found) == pytest.approx(statistics.stdev(truth), rel=0.1)
    assert statistics.stdev(map(statistics.fmean, scores)) > 1.5 * statistics.stdev(truth)


def test_split_keeps_engines_and_ranks_whole():
    base = config(groups_per_step=2, group_size=2)  # each split is simulated
    wide = base.model_copy(
        update={
            "engine": base.engine.model_copy(update={"options": {"tensor_parallel_size": 2}}),
            "learner": base.learner.model_copy(update={"mesh": MeshConfig(shard=2)}),
        }
    )
    found = [split for split in iterate_splits(wide, SPEEDS, 8) if not split.shared]
    assert found and all(split.engines >= 2 for split in found)
    own, four = (make_scenario(wide, SPEEDS, learners=learners).learner.per_token for learners in (0, 4))
    assert own == SPEEDS.learner.per_token == pytest.approx(2 * four), "speeds are those of the ranks there are"
    with raises_with(ConfigError, key="--devices", value=1):
        list(iterate_splits(wide, SPEEDS, 1))


def test_speeds_are_a_file(tmp_path):
    speeds = SPEEDS.model_copy(update={"reward_seconds": make_trace([0.1 * number for number in range(500)])})
    path = tmp_path / "speeds.yaml"
    path.write_text(dump(speeds))
    assert load(path, model=Speeds) == speeds
    assert isinstance(speeds, Config) and ClosedForm.from_scenario(make_scenario(config(), speeds)).engines == 2
