"""A run that is killed in the midst of an evaluation beside training does it again when it is resumed."""

import json
import signal
import sqlite3
from contextlib import closing

import pytest

from antiphon.inspect.audit import audit
from tests import warm
from tests.chaos.test_resume import KILLED


def evaluations(run, lineage):
    """Return the evaluations of a lineage in order: (step, versions), without versions if it did not end."""
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        query = "SELECT kind, detail FROM events WHERE lineage = ? AND kind LIKE 'evaluate%' ORDER BY number"
        rows = [(kind, json.loads(detail)) for kind, detail in db.execute(query, (lineage,))]
    found = []
    for kind, detail in rows:
        if kind == "evaluate":
            found.append((detail["step"], None))
        else:
            assert found.pop() == (detail["step"], None)
            found.append((detail["step"], (detail["first"], detail["last"])))
    return found


@pytest.mark.chaos
def test_an_evaluation_that_a_kill_cut_off_is_done_again(project):
    digits = {
        "name": "digits",
        "prompts": {"source": "mytask:problems"},
        "test": {"source": "mytask:problems", "split": "test"},
        "reward": "mytask:digits",
    }
    path = project.config(
        steps=5,
        tasks=[digits],
        rollout={"async_ratio": 1},
        evaluation={"every": 1, "samples": 4, "concurrency": 1},  # 160 attempts, one by one, against 8 for a step
        checkpoint={"every": 1},
    )
    killed = warm.run("-c", KILLED, "published", 3, "train", path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run = project.folder / "runs" / "run"
    assert evaluations(run, 0) == [(0, (0, 0)), (1, None)]
    assert not any("evaluation/accuracy" in line for line in project.metrics())

    resumed = project.run("train", path, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert audit(run).violations == []
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        ((cut,),) = db.execute("SELECT version FROM lineages WHERE lineage = 1").fetchall()
    (step, (first, last)), *_, final = evaluations(run, 1)
    assert step == 1 and first == cut <= last <= 5 and final == (5, (5, 5))
    lines = [line for line in project.metrics() if "evaluation/accuracy" in line]
    told = [(line["evaluation/first_version"], line["evaluation/last_version"]) for line in lines]
    assert told == [versions for _, versions in evaluations(run, 1)[:-1]] and lines[0]["lineage"] == 1
