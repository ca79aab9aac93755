"""The auditor: clean runs are clean, and each way to break a promise is found."""

import json
import shutil
import sqlite3
from contextlib import closing

import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from antiphon.cli.app import app
from antiphon.core.errors import RecordError, RolloutError
from antiphon.inspect import audit_ledger
from antiphon.inspect.audit import audit
from antiphon.record import safe_files
from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import ScenarioConfig
from tests.raising import raises_with

SCENARIO = {
    "name": "audited",
    "steps": 8,
    "rollout": {
        "groups_per_step": 4,
        "group_size": 3,
        "async_ratio": 1.5,
        "redundancy": 1,
        "extra_groups": 2,
        "order": "ready",
        "filter": "spread",
        "sampling": {"max_tokens": 200},
    },
    "engines": {"count": 2, "speed": {"slots": 8}},
    "learner": {"step": 1.0},
    "response_tokens": {"kind": "lognormal", "mean": 60, "spread": 0.8},
    "faults": [{"point": "reward.lost", "chance": 0.05}],
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    simulate(ScenarioConfig.model_validate(SCENARIO), keep=root)
    return root / "audited"


@pytest.fixture
def run(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "run")


def test_a_run_that_keeps_its_promises_is_clean(clean):
    found = audit(clean)
    assert found.violations == []
    assert found.balance[0]["trained"] == 8 * 4 * 3
    assert found.balance[0]["redundant"] and found.balance[0]["failed"]


ONE = (
    "(lineage, grp, sibling, try) IN (SELECT lineage, grp, sibling, try FROM attempts WHERE status = 'trained' LIMIT 1)"
)
ALL_FILTERED = {  # every group is rejected, until the run gives up; other groups are in work then
    "name": "rejected",
    "steps": 4,
    "rollout": {**SCENARIO["rollout"], "redundancy": 0},
    "engines": {"count": 2, "speed": {"slots": 8}},
    "success": {"mean": 1.0},
}


def test_an_error_leaves_no_attempt_open(tmp_path):
    with pytest.raises(RolloutError, match="filtered out"):
        simulate(ScenarioConfig.model_validate(ALL_FILTERED), keep=tmp_path)
    found = audit(tmp_path / "rejected")
    assert found.violations == [] and found.open == 0
    assert found.balance[0].keys() == {"filtered", "lost"}
    assert "RolloutError" in found.ends[0]


def test_attempts_open_in_an_ended_run_are_found(run):
    assert audit(run).ends == {0: ""}
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        db.executescript(
            "UPDATE attempts SET status = 'finished' WHERE status = 'cancelled';"
            " DELETE FROM balance WHERE status = 'cancelled'; UPDATE groups SET outcome = NULL WHERE outcome = 'cancelled'"
        )
    found = audit(run)
    assert [violation for violation in found.violations if "alive in a lineage that has ended" in violation]
    with closing(sqlite3.connect(run / "ledger.db")) as db:  # a run that was killed, or is running
        db.executescript("DELETE FROM events WHERE kind = 'end'")
    found = audit(run)
    assert found.violations == [] and found.ends == {} and found.open > 0


PLANTED = {  # what is done to the ledger, and what is said of it
    "an attempt disappears": (f"DELETE FROM attempts WHERE {ONE}", "were dispatched"),
    "an attempt ends another way": (f"UPDATE attempts SET status = 'stale' WHERE {ONE}", "attempts ended stale"),
    "an attempt never ends": (f"UPDATE attempts SET status = 'running' WHERE {ONE}", "alive in a group that has ended"),
    "an unknown state": (f"UPDATE attempts SET status = 'forgotten' WHERE {ONE}", "no known state"),
    "trained without a score": (f"UPDATE attempts SET score = NULL WHERE {ONE}", "without a score"),
    "trained after a failure": (f"UPDATE attempts SET failure = 'reward: lost' WHERE {ONE}", "after a failure"),
    "trained in another step": (f"UPDATE attempts SET step = 1 + step % 8 WHERE {ONE}", "did not take their group"),
    "trained in no step": (f"UPDATE attempts SET step = 99 WHERE {ONE}", "a step that was not done"),
    "a trajectory trained twice": (
        f"UPDATE attempts SET origin = (SELECT '0:' || grp || '.' || sibling || '.' || try FROM attempts"
        f" WHERE status = 'trained' ORDER BY step DESC LIMIT 1) WHERE {ONE}",
        "trained on twice",
    ),
    "a prompt trained twice": (
        "UPDATE groups SET prompt = (SELECT prompt FROM groups WHERE step = 2 LIMIT 1) WHERE step = 1",
        "prompts trained on twice",
    ),
    "too old": (f"UPDATE attempts SET started = started - 3 WHERE {ONE}", "older than 2"),
    "too many of the oldest": (
        "UPDATE attempts SET started = 3 WHERE step = 6 AND status = 'trained'",
        "steps with more than 2 groups of age 2",
    ),
    "a step disappears": ("DELETE FROM steps WHERE step = 4", "do not follow one another"),
    "a version is left out": ("UPDATE steps SET version = version + 1 WHERE step > 4", "not with the next version"),
    "a step that stands is called undone": ("UPDATE steps SET undone = 1 WHERE step = 4", "marked undone that stand"),
    "an attempt of no group": (
        "DELETE FROM groups WHERE (lineage, grp) IN (SELECT lineage, grp FROM attempts LIMIT 1)",
        "attempts of no group",
    ),
    "another score": (f"UPDATE attempts SET score = 0.25 WHERE {ONE}", "another score"),
    "another length": (f"UPDATE attempts SET tokens = tokens + 1 WHERE {ONE}", "another score or length"),
    "no trajectory": (f"UPDATE attempts SET file = NULL WHERE {ONE}", "no file"),
    "a life without a cut": ("INSERT INTO lineages VALUES (1, 7, 3, 3, 'x', NULL)", "without a parent"),
    "alive in a life that has ended": (
        f"INSERT INTO lineages VALUES (1, 0, 8, 8, 'x', NULL); UPDATE attempts SET status = 'finished' WHERE {ONE}",
        "alive in a lineage that has ended",
    ),
    "a prompt not offered again": (
        "INSERT INTO lineages VALUES (1, 0, 8, 8, 'x', NULL); UPDATE groups SET outcome = 'lost' WHERE outcome = 'cancelled';"
        " INSERT INTO groups SELECT 1, 1000, max(prompt) + 1, 8, 'cancelled', NULL FROM prompts",
        "not offered again",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_found(run, planted):
    change, said = PLANTED[planted]
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        db.executescript(change)
    assert any(said in violation for violation in audit(run).violations), audit(run).violations


EVALUATION = [  # beside training, as its run writes it
    ("evaluate", {"step": 2, "version": 2}),
    ("evaluated", {"step": 2, "first": 2, "last": 4, "accuracy": 0.5}),
]
EVALUATIONS_PLANTED = {  # what is done to the ledger, and what is said of it
    "of a version that was not published": ("version", 99, "not published"),
    "before its step was published": ("version", 1, "older than its step"),
    "with tokens that are too old": ("first", 1, "older than theirs"),
    "with versions in reverse": ("last", 1, "older than theirs"),
    "with tokens of an unknown version": ("last", 99, "not published"),
    "with an accuracy that is none": ("accuracy", 1.5, "no share"),
}


@pytest.mark.parametrize("planted", EVALUATIONS_PLANTED)
def test_evaluations_of_other_versions_are_found(run, planted):
    key, value, said = EVALUATIONS_PLANTED[planted]

    def audit_with(changes):
        with closing(sqlite3.connect(run / "ledger.db")) as db:
            db.execute("DELETE FROM events WHERE kind LIKE 'evaluate%'")
            for kind, detail in EVALUATION:
                changed = json.dumps(detail | {name: changes[name] for name in detail.keys() & changes})
                db.execute("INSERT INTO events (lineage, second, kind, detail) VALUES (0, 0, ?, ?)", (kind, changed))
            db.commit()
        return audit(run).violations

    assert audit_with({}) == []
    assert any(said in violation for violation in audit_with({key: value}))


def test_an_evaluation_that_never_began_is_found(run):
    kind, detail = EVALUATION[1]
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        row = (kind, json.dumps(detail))
        db.execute("INSERT INTO events (lineage, second, kind, detail) VALUES (0, 0, ?, ?)", row)
        db.commit()
    assert any("had not begun" in violation for violation in audit(run).violations)


def test_curriculum_need_not_offer_a_prompt_again(run):
    """It draws by the scores of attempts, which may be others after a resume."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    (task,) = config["tasks"]
    task["curriculum"] = {"sweep": 5}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    change, said = PLANTED["a prompt not offered again"]
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        db.executescript(change)
    assert not any(said in violation for violation in audit(run).violations)


def test_a_run_without_attempts_is_told_from_a_clean_one(run):
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        for table in ("attempts", "groups", "steps", "balance", "credit"):
            db.execute(f"DELETE FROM {table}")
        db.commit()
    shutil.rmtree(run / "rollouts")
    done = CliRunner().invoke(app, ["audit", str(run)])
    assert done.exit_code == 0 and "no attempts" in done.output


def test_trajectories_that_are_gone_are_found(run):
    _, _, *files = sorted((run / "rollouts").iterdir())
    pq.write_table(pq.read_table(files[0]).slice(0, 0), files[0])
    files[1].unlink()
    said = "\n".join(audit(run).violations)
    assert f"{files[0].name} lacks" in said and f"{files[1].name} cannot be read" in said


def test_a_torn_checkpoint_is_found(run):
    (checkpoint,) = (run / "checkpoints").iterdir()
    (checkpoint / "state.json").write_text("{}")
    assert any("state.json is not as it was written" in violation for violation in audit(run).violations)


def test_a_commit_during_an_audit_is_not_seen(run, monkeypatch):
    with closing(sqlite3.connect(run / "ledger.db", isolation_level=None)) as writer:
        writer.execute("UPDATE events SET second = second")  # a live run has a log beside its ledger
        mark_surviving = audit_ledger.mark_surviving

        def commit_first(db):
            writer.execute(f"DELETE FROM attempts WHERE {ONE}")
            mark_surviving(db)

        monkeypatch.setattr(audit_ledger, "mark_surviving", commit_first)
        assert audit(run).violations == []
        assert audit(run).violations != []


def test_a_checkpoint_that_is_pruned_during_an_audit_is_no_violation(run, monkeypatch):
    (checkpoint,) = (run / "checkpoints").iterdir()
    shutil.copytree(checkpoint, run / "checkpoints" / "step_000001")
    read_json = safe_files.read_json

    def prune_first(directory, name):
        if directory.name == "step_000001":
            shutil.rmtree(directory)
        return read_json(directory, name)

    monkeypatch.setattr(safe_files, "read_json", prune_first)
    assert audit(run).violations == []


def test_without_a_ledger_there_is_one_clear_error(tmp_path, run):
    with raises_with(RecordError, path=tmp_path / "ledger.db"):
        audit(tmp_path)
    (run / "ledger.db").write_bytes(b"nonsense" * 1000)
    with raises_with(RecordError, path=run / "ledger.db"):
        audit(run)
