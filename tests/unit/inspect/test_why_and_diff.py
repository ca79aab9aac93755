"""Two runs: the first thing in which they differ, whatever it is."""

import shutil
import sqlite3
from contextlib import closing

import pytest

from antiphon.inspect.diff import diff
from antiphon.inspect.why import why
from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import ScenarioConfig

SCENARIO = {
    "steps": 4,
    "rollout": {"groups_per_step": 2, "group_size": 2, "async_ratio": 1, "sampling": {"max_tokens": 50}},
    "response_tokens": {"mean": 20},
}


def played(root, **changes):
    simulate(ScenarioConfig.model_validate(SCENARIO | changes), keep=root)
    return root / "scenario"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return played(tmp_path_factory.mktemp("one"))


def test_equal_runs_do_not_differ(run, tmp_path):
    assert diff(run, played(tmp_path)) is None


def test_a_configuration_differs_before_what_follows_from_it(run, tmp_path):
    found = diff(run, played(tmp_path, seed=1))
    assert found.startswith("configuration: ") and "seed: 1" in found


CHANGES = {
    "UPDATE lineages SET code = 'other'": "code: ",
    "UPDATE prompts SET id = 'another' WHERE prompt = (SELECT prompt FROM groups WHERE step = 2 LIMIT 1)": "step 2: data",
    "UPDATE attempts SET digest = digest + 1 WHERE step = 3": "step 3: ",
    "UPDATE attempts SET score = 0.5 WHERE step = 3": "score",
    "UPDATE attempts SET started = 0 WHERE step = 3": "the version it started at",
    "UPDATE steps SET batch = 'x' WHERE step = 2": "batch",
    "DELETE FROM attempts WHERE step = 4": "has no more",
    "UPDATE versions SET digest = 7 WHERE version = 3": "version 3: its weights",
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_difference_is_named(run, tmp_path, change):
    other = shutil.copytree(run, tmp_path / "other")
    with closing(sqlite3.connect(other / "ledger.db")) as db:
        db.executescript(change)
    assert CHANGES[change] in diff(run, other)


def test_every_attempt_can_be_asked_for(run):
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        attempts = db.execute("SELECT lineage, grp, sibling, try, status FROM attempts").fetchall()
    for lineage, *identity, status in attempts:
        told = dict(why(run, f"{lineage}:{'.'.join(map(str, identity))}"))
        assert told["status"].startswith(status)
