"""Whole runs that choose prompts by their solve rates and groups by their mean scores."""

import json
import sqlite3
from contextlib import closing
from statistics import fmean

import pytest

from antiphon.core.config import add_import_folder, load
from antiphon.core.errors import ConfigError
from antiphon.inspect.audit import audit
from antiphon.inspect.replay import replay
from antiphon.run import commands
from antiphon.run.config import RunConfig

LOW, HIGH = 0.02, 0.2
CHOSEN = {"name": "chosen", "prompts": {"source": "mytask:problems"}, "reward": "mytask:digits"}
CHOSEN |= {"mean_range": [LOW, HIGH], "curriculum": {"sweep": 3, "decay": 1.0}, "evaluation": {"success_at": 0.125}}
ALL = {"name": "all", "prompts": {"source": "mytask:problems"}, "reward": "mytask:digits"}


def configure(project, *overrides, tasks=(CHOSEN, ALL), **rollout):
    rollout = {"groups_per_step": 4, "group_size": 4, "timeout": 180, "sampling": {"max_tokens": 8}, **rollout}
    path = project.config(tasks=list(tasks), rollout=rollout, learner={"optimizer": {"learning_rate": 1e-4}})
    add_import_folder(path)
    return load(path, ("cluster.debug=true", "record.live=off", "evaluation.every=0", *overrides), model=RunConfig)


def query(project, sql, name="run"):
    with closing(sqlite3.connect(project.folder / "runs" / name / "ledger.db")) as ledger:
        return ledger.execute(sql).fetchall()


def means(project):
    """Return (task, outcome, mean score) of each group that was trained on or filtered out."""
    rows = query(
        project,
        "SELECT lineage, grp, task, outcome, score FROM attempts JOIN groups g USING (lineage, grp) JOIN prompts USING (prompt)"
        " WHERE outcome IN ('complete', 'filtered') AND status IN ('trained', 'filtered') ORDER BY 1, 2",
    )
    groups = {}
    for lineage, group, task, outcome, score in rows:
        groups.setdefault((lineage, group, task, outcome), []).append(score)
    return [(task, outcome, fmean(scores)) for (_, _, task, outcome), scores in groups.items()]


def test_groups_outside_the_range_of_their_task_are_replaced(project):
    config = configure(project, async_ratio=1, extra_groups=1)
    assert commands.train(config) == 0
    found = means(project)
    assert len({outcome for task, outcome, _ in found if task == "chosen"}) == 2
    for task, outcome, mean in found:
        assert outcome == ("filtered" if task == "chosen" and not LOW <= mean <= HIGH else "complete")
    run = project.folder / "runs" / "run"
    assert audit(run).violations == []
    replay(run, config)

    # Each prompt counts the attempts of its groups that were trained on or filtered out, once.
    state = json.loads((run / "checkpoints" / "step_000003" / "state.json").read_text())
    counted = {
        f"chosen/train-{place}": (solved, tried) for place, _, solved, tried in state["mixture"]["curricula"]["chosen"]
    }
    rows = query(
        project,
        "SELECT id, sum(score >= 0.125), count(*) FROM attempts JOIN groups USING (lineage, grp) JOIN prompts USING (prompt)"
        " WHERE task = 'chosen' AND status IN ('trained', 'filtered') GROUP BY id",
    )
    assert {name: found for name, found in counted.items() if found[1]} == {name: tuple(found) for name, *found in rows}


def test_resumed_curriculum_draws_what_the_uninterrupted_one_does(project):
    settings = {"async_ratio": 0, "deterministic": True}
    sql = (
        "SELECT s.step, g.grp, task, id, epoch, s.batch FROM groups g JOIN prompts USING (prompt)"
        " JOIN steps s USING (lineage, step) WHERE NOT s.undone ORDER BY 1, 2"
    )
    assert commands.train(configure(project, "steps=4", "name=whole", **settings)) == 0
    assert commands.train(configure(project, "steps=2", **settings)) == 0
    assert commands.train(configure(project, "steps=4", **settings), resume=True) == 0
    whole = query(project, sql, "whole")
    assert query(project, sql) == whole and whole[-1][0] == 4
    assert audit(project.folder / "runs" / "run").violations == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mean_range": [0.8, 0.2]}, r"tasks\.0\.mean_range: \[0\.8, 0\.2\] keeps no group"),
        ({"curriculum": {"sweep": 0}}, r"tasks\.0\.curriculum\.sweep"),
        ({"weight": 0, "test": {"source": "mytask:problems"}}, r"tasks\.0\.curriculum: is not used"),
    ],
)
def test_mistakes_are_named(project, change, said):
    with pytest.raises(ConfigError, match=said):
        configure(project, tasks=(CHOSEN | change, ALL))
