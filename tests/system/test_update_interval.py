"""`weights.every`: whole runs whose engines are updated every few training steps."""

import os
import sqlite3
from contextlib import closing

import pytest

import antiphon
from antiphon.core.config import add_import_folder, load
from antiphon.core.errors import ConfigError
from antiphon.inspect.audit import audit
from antiphon.inspect.replay import replay
from antiphon.run import commands
from antiphon.run.config import RunConfig

pytestmark = pytest.mark.system

CORE = min(os.sched_getaffinity(0))
ONLY_LAST = {"every": 0}  # no checkpoints on the way, at which engines are updated too


def read(project, *overrides, **sections):
    path = project.config(**sections)
    add_import_folder(path)
    return load(path, ("cluster.debug=true", "record.live=off", *overrides), model=RunConfig)


def query(run, text):
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        return db.execute(text).fetchall()


def list_updates(run):
    """Return the versions that engines got, and those that sampled what was trained on."""
    updates = [n for (n,) in query(run, "SELECT version FROM versions ORDER BY lineage, version")]
    sampled = query(run, "SELECT DISTINCT newest FROM attempts WHERE status = 'trained' ORDER BY 1")
    return updates, {n for (n,) in sampled}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("order", "extra"), [("fifo", 0), ("ready", 1)])
def test_engines_are_updated_every_few_steps(project, workers, order, extra):
    rollout = {"async_ratio": 2, "order": order, "extra_groups": extra, "workers": workers}
    config = read(project, rollout=rollout, engine={"replicas": 2}, weights={"every": 3}, checkpoint=ONLY_LAST, steps=7)
    assert commands.train(config, overwrite=True) == 0
    run, steps = project.folder / "runs" / "run", project.metrics()
    updates, sampled = list_updates(run)
    assert updates == [3, 6, 7], "the last for the evaluation at the end"
    assert sampled <= {0, 3, 6} and {0, 3} <= sampled
    assert all(step["age/max"] <= 2 for step in steps)
    assert [step["step"] for step in steps if "weights/megabytes" in step] == [3, 6]
    assert audit(run).violations == []
    assert project.summary()["versions"] == 7
    assert replay(run, config) == 7


def test_engines_that_share_a_device_with_the_learner(project):
    placement = {"learner": f"cpu:{CORE}-{CORE}", "engine": "with learner"}
    sections = {"rollout": {"async_ratio": 1}, "weights": {"every": 2}, "checkpoint": ONLY_LAST, "steps": 5}
    config = read(project, "cluster.debug=false", placement=placement, record={"events": True}, **sections)
    assert commands.train(config, overwrite=True) == 0
    run = project.folder / "runs" / "run"
    assert list_updates(run) == ([2, 4, 5], {0, 2, 4})
    assert audit(run).violations == []
    assert '"event":"sleep"' in (run / "events.jsonl").read_text()


@pytest.mark.parametrize("blocking", [True, False])
def test_an_evaluation_begins_with_the_weights_of_its_step(project, blocking):
    sections = {
        "weights": {"every": 4},
        "rollout": {"async_ratio": 3},
        "evaluation": {"every": 3, "blocking": blocking},
    }
    config = read(project, checkpoint={"every": 1}, steps=7, **sections)
    assert commands.train(config, overwrite=True) == 0
    run = project.folder / "runs" / "run"
    assert list_updates(run)[0] == [3, 4, 6, 7]
    fields = "detail ->> '$.step', detail ->> '$.first', detail ->> '$.last'"
    measured = query(run, f"SELECT {fields} FROM events WHERE kind = 'evaluated'")
    assert all(step == first for step, first, _ in measured)
    if blocking:  # else one that still runs makes the next be left out
        assert measured == [(0, 0, 0), (3, 3, 3), (6, 6, 6), (7, 7, 7)]
    assert audit(run).violations == []


@pytest.mark.parametrize(("cut", "updates"), [(3, [3, 3, 6, 8]), (4, [3, 4, 4, 6, 8])])
def test_a_resume_begins_with_the_weights_of_its_checkpoint(project, cut, updates):
    """At step 3 nothing is in flight, so that the resumed run equals the whole one bit for bit."""
    sections = {
        "weights": {"every": 3},
        "rollout": {"async_ratio": 2, "deterministic": True},
        "checkpoint": {"every": 1},
    }
    runs = {name: project.folder / "runs" / name for name in ("whole", "cut")}
    for name, steps, resume in (("whole", 8, False), ("cut", cut, False), ("cut", 8, True)):
        config = read(project, name=name, steps=steps, **sections)
        assert commands.train(config, overwrite=not resume, resume=resume) == 0
    assert list_updates(runs["whole"])[0] == [3, 6, 8] and list_updates(runs["cut"])[0] == updates
    weights = [(run / "checkpoints" / "step_000008" / "model.safetensors").read_bytes() for run in runs.values()]
    assert (weights[0] == weights[1]) == (cut == 3)
    assert audit(runs["whole"]).violations == audit(runs["cut"]).violations == []
    assert replay(runs["cut"], config) == 8


def test_a_run_that_is_stopped_is_measured_with_its_last_weights(project):
    sections = {"weights": {"every": 4}, "rollout": {"async_ratio": 3}, "checkpoint": ONLY_LAST}
    with antiphon.start_run(read(project, steps=8, **sections), overwrite=True) as run:
        for step in run:
            if step.step == 2:
                break
    directory = project.folder / "runs" / "run"
    assert list_updates(directory)[0] == [2]
    ((last,),) = query(directory, "SELECT max(detail ->> '$.first') FROM events WHERE kind = 'evaluated'")
    assert last == project.summary()["versions"] == 2
    assert audit(directory).violations == []


@pytest.mark.parametrize(
    ("rollout", "named"),
    [
        ({"async_ratio": 0}, ["rollout.async_ratio", "at least 2", "allows 1"]),
        ({"async_ratio": 1.5}, ["rollout.async_ratio", "at least 2", "allows 2"]),
        ({"policy": "one_step_off", "async_ratio": 1}, ["rollout.policy", "one_step_off"]),
    ],
)
def test_intervals_that_freshness_forbids_are_refused(project, rollout, named):
    with pytest.raises(ConfigError) as refused:
        read(project, rollout=rollout, weights={"every": 3})
    assert refused.value.key == "weights.every"
    assert all(word in str(refused.value) for word in named)


def test_audit_finds_samples_of_versions_no_engine_had(project):
    config = read(project, rollout={"async_ratio": 1}, weights={"every": 2}, checkpoint=ONLY_LAST, steps=4)
    assert commands.train(config, overwrite=True) == 0
    run = project.folder / "runs" / "run"
    with closing(sqlite3.connect(run / "ledger.db")) as db, db:
        db.execute("UPDATE attempts SET newest = 3 WHERE status = 'trained' AND newest = 2")
    assert any("no engine got" in violation for violation in audit(run).violations)
