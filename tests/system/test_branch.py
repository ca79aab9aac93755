"""Runs that begin at a checkpoint of another run, with its configuration or with another one."""

import hashlib
import re
import shutil
import signal
import sqlite3
from contextlib import closing

import pytest
import yaml

import antiphon
from antiphon.inspect.audit import audit
from tests import warm

pytestmark = pytest.mark.system
KILLED = """
import sys
from antiphon.cli import main
from antiphon.core import failpoints
failpoints.arm("published", 2)
sys.argv = ["antiphon", *sys.argv[1:]]
main()
"""
ROLLOUT = {"groups_per_step": 2, "group_size": 4, "timeout": 180, "sampling": {"max_tokens": 8}}


def contents(directory):
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != "lock")
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def trained(run, after):
    """Batch, digest of the published weights, and prompts of each step that stands."""
    query = (
        "SELECT step, batch, digest, (SELECT group_concat(id || ' ' || epoch || ' ' || grp, ', ') FROM"
        " (SELECT * FROM groups JOIN prompts USING (prompt) WHERE lineage = s.lineage AND step = s.step ORDER BY grp))"
        " FROM steps s JOIN versions USING (lineage, version) WHERE NOT undone AND step > ? ORDER BY step"
    )
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        return db.execute(query, (after,)).fetchall()


def test_unchanged_branch_repeats_its_source(project):
    """Killed, without its source, and resumed, it does to the last bit what the source went on to do."""
    deterministic = ROLLOUT | {"async_ratio": 0, "deterministic": True, "max_attempts": 2}
    every = {"every": 1, "keep_every": 1}
    path = project.config(steps=6, rollout=deterministic, checkpoint=every, model={"path": "mytask:build"})
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    source, new = project.folder / "runs" / "run", project.folder / "runs" / "new"
    before, whole = contents(source), trained(source, 3)

    command = ["branch", source, "--at", 3, "--name", "new", "--code", project.folder]
    killed = warm.run("-c", KILLED, *command)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert contents(source) == before
    aside = shutil.move(source, project.folder / "aside")
    assert audit(new).violations == []

    resumed = project.run("train", path, "--resume", "name=new")
    assert resumed.returncode == 0, resumed.stderr
    assert len(whole) == 3 and trained(new, 0) == whole
    last = "checkpoints/step_000006/model.safetensors"
    assert (new / last).read_bytes() == (aside / last).read_bytes()
    assert [line["step"] for line in project.metrics("new")][-1] == project.summary("new")["steps"] == 6
    told = project.run("audit", new)
    assert told.returncode == 0 and f"began at {source}: step 3, lineage 0" in told.stdout, told.stdout
    assert contents(aside) == before
    assert project.run("diff", aside, new).stdout == "no difference\n"
    replayed = project.run("replay", new, "--code", project.folder, "--weights")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_branch_of_a_live_run_trains_on_with_other_values(project):
    """Another loss, learning rate, group size, seed and reward, while the source goes on."""
    kept = {"every": 2, "keep_every": 2}
    path = project.config(steps=100_000, rollout=ROLLOUT | {"async_ratio": 1}, checkpoint=kept)
    process = project.start("train", path)
    assert any(re.match(r"step +3/", line) for line in process.stdout)
    source, name = project.folder / "runs" / "run", "run_at_2"
    changes = ("algorithm.loss=cispo", "learner.optimizer.learning_rate=0.003", "rollout.group_size=3", "seed=4")
    changes += ("tasks.0.reward=exact_match", "steps=8")
    done = project.run("branch", source, "--at", "2", "--code", project.folder, *changes)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert done.returncode == 0, done.stderr
    lines = project.metrics(name)
    assert [line["step"] for line in lines] == [3, 4, 5, 6, 7, 8]
    assert {line["learner/lr"] for line in lines} == {0.003}
    run = antiphon.open_run(project.folder / "runs" / name)
    assert run.config["algorithm"]["loss"] == "cispo" and run.config["rollout"]["group_size"] == 3
    assert (run.branch_point.run, run.branch_point.step, run.branch_point.lineage) == (str(source), 2, 0)
    assert run.audit().violations == [] and audit(source).violations == []
    assert len(run.attempts("trained")) == 6 * 2 * 3
    summary = project.summary(name)
    assert summary["accuracy_before"] is None and 0 <= summary["accuracy_after"] <= 1


def test_branch_is_refused_with_one_error(project):
    path = project.config(steps=2)
    assert project.run("train", path).returncode == 0
    run = project.folder / "runs" / "run"
    code = ["--code", str(project.folder)]
    for arguments, said in (
        (["--at", "1", *code], "steps that have one: 0, 2"),
        (["--at", "2", *code], "steps: must be above 2"),
        (["--at", "0"], "--code DIR"),
        (["--at", "0", *code, "learner.lora.rank=4"], "learner.lora.rank"),
        (["--at", "0", *code, "algorithm.losss=cispo"], "algorithm.loss"),
    ):
        done = project.run("branch", run, *arguments)
        assert done.returncode == 2 and said in done.stderr, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
    missing = project.run("branch", project.folder / "nowhere", "--at", "0")
    assert missing.returncode == 2 and "config.yaml" in missing.stderr
    changed = project.run("train", path, "--resume", "rollout.group_size=8")
    assert changed.returncode == 2 and "antiphon branch" in changed.stderr
    assert [each.name for each in run.parent.iterdir()] == ["run"]


def test_branch_from_python_takes_objects(tmp_path, model):
    def digits(prompt, transcript):
        return sum(character.isdigit() for character in transcript.response) / 8

    def first(prompt, transcript):
        return float(transcript.response[:1].isdigit())

    prompts = [{"prompt": f"{number}+1=", "answer": "1"} for number in range(8)]
    rollout = {"groups_per_step": 2, "group_size": 4, "timeout": 180, "sampling": {"max_tokens": 8}}
    config = {"name": "run", "steps": 2, "rollout": rollout, "record": {"directory": str(tmp_path), "live": "off"}}
    source = antiphon.train(config, model=str(model), prompts=prompts, reward=digits)
    found = antiphon.branch(source.directory, 2, steps=4, name="other", prompts=prompts, reward=first)
    assert found.exit_code == 0 and found.directory == tmp_path / "other" and found.summary["steps"] == 4
    assert antiphon.open_run(found.directory).branch_point.run == str(source.directory)
    recorded = yaml.safe_load((found.directory / "config.yaml").read_text())
    assert "first@" in recorded["tasks"][0]["reward"]
