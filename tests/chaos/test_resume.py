"""A run that was killed and gone on with is the run that was not: to the last bit where it is deterministic, without loss
where it is not."""

import json
import os
import re
import shutil
import signal
import sqlite3
from contextlib import closing
from importlib.util import find_spec

import pytest
import torch

from antiphon.inspect.audit import audit
from antiphon.record import trajectories
from tests import warm

KILLED = """
import sys
from antiphon.cli import main
from antiphon.core import failpoints as points
points.arm(sys.argv[1], int(sys.argv[2]))
sys.argv = ["antiphon", *sys.argv[3:]]
main()
"""


def trained(run):
    """What each surviving step was trained on, in order: attempt, tokens, log-probs, score."""
    query = (
        "SELECT a.step, a.grp, a.sibling, a.try, coalesce(a.origin, a.lineage || ':' || a.grp || '.' || a.sibling || '.' ||"
        " a.try), a.file FROM attempts a JOIN steps s USING (lineage, step) WHERE a.status = 'trained' AND NOT s.undone"
        " ORDER BY 1, 2, 3, 4"
    )
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        rows = db.execute(query).fetchall()
    files = {file: trajectories.read(run / "rollouts" / file) for file in {row[5] for row in rows}}
    for step, group, sibling, attempt, origin, file in rows:
        made_by = trajectories.AttemptId(*map(int, origin.partition(":")[2].split(".")))
        found = files[file][made_by]
        content = [(s.tokens.tobytes(), s.logprobs.tobytes(), s.versions.tobytes()) for s in found.segments]
        yield step, group, sibling, attempt, found.meta.score.value, content


def last_checkpoint(run):
    directory = max((run / "checkpoints").glob("step_??????"))
    state = torch.load(directory / "training_state" / "0.pt")
    moments = [value for entry in state["moments"].values() for value in entry.values()]
    return (directory / "model.safetensors").read_bytes(), [moment.numpy().tobytes() for moment in moments]


@pytest.mark.chaos
def test_a_deterministic_run_goes_on_to_the_last_bit(project):
    def config(name):
        rollout = {"groups_per_step": 2, "group_size": 4, "async_ratio": 0, "deterministic": True, "max_attempts": 2}
        path = project.config(
            name=name,
            steps=6,
            rollout=rollout | {"timeout": 180, "sampling": {"max_tokens": 8}},
            checkpoint={"every": 1},
        )
        return path.rename(path.with_name(f"{name}.yaml"))

    assert project.run("train", config("whole")).returncode == 0
    path, cut, whole = config("cut"), project.folder / "runs" / "cut", project.folder / "runs" / "whole"
    for number, (point, count) in enumerate((("published", 2), ("ledger.commit", 5), ("rollouts.written", 2))):
        killed = warm.run("-c", KILLED, point, count, "train", path, *["--resume"] * (number > 0))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not audit(cut).violations
    resumed = project.run("train", path, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert not audit(cut).violations
    assert list(trained(cut)) == list(trained(whole))
    assert last_checkpoint(cut) == last_checkpoint(whole)
    assert project.run("diff", whole, cut).stdout == "no difference\n"
    stands = {line["step"]: line["reward/mean"] for line in project.metrics("cut")}  # the last line of each step
    assert stands == {line["step"]: line["reward/mean"] for line in project.metrics("whole")}


@pytest.mark.chaos
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is optional: pip install -e '.[ray]'")
def test_a_run_whose_head_is_gone_goes_on_elsewhere(project):
    """From the run directory alone: in another folder, on another cluster, with other engines, on weights that come another
    way."""
    path = project.config(steps=6, checkpoint={"every": 1}, rollout={"async_ratio": 1})
    assert warm.run("-c", KILLED, "published", 4, "train", path).returncode == -signal.SIGKILL
    elsewhere = project.folder / "elsewhere"
    shutil.move(project.folder / "runs", elsewhere)
    cores = ", ".join(f"cpu:{core}-{core}" for core in sorted(os.sched_getaffinity(0))[:2])
    changed = ("cluster.kind=ray", "weights.channel=object_store", "engine.replicas=2", f"placement.engine={cores}")
    resumed = project.run("train", path, "--resume", f"record.directory={elsewhere}", *changed)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step" in resumed.stdout
    assert not audit(elsewhere / "run").violations
    assert json.loads((elsewhere / "run" / "summary.json").read_text())["steps"] == 6


@pytest.mark.chaos
@pytest.mark.parametrize("steps", [1, 12], ids=["in the first step", "later"])
def test_a_run_is_resumed_with_default_checkpoints(project, steps):
    """Killed as it publishes a step: what was trained on since the last checkpoint is undone, and no attempt counts twice."""
    path, run = project.config(steps=15, rollout={"async_ratio": 1}), project.folder / "runs" / "run"
    killed = warm.run("-c", KILLED, "publish", steps, "train", path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = project.run("train", path, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert not audit(run).violations
    found = [(group, sibling) for _, group, sibling, *_ in trained(run)]
    assert len(found) == len(set(found)) == 15 * 2 * 4
    assert len(list((run / "checkpoints").iterdir())) == 2


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("signals", "every", "code"),
    [
        ([signal.SIGTERM], 1, -signal.SIGTERM),
        ([signal.SIGTERM], 0, -signal.SIGTERM),
        ([signal.SIGINT], 0, 130),
        ([signal.SIGINT, signal.SIGINT], 1, 130),
        ([signal.SIGINT, signal.SIGINT], 0, 130),
    ],
    ids=["SIGTERM", "SIGTERM without checkpoint", "Ctrl-C without checkpoint", "two", "two without checkpoint"],
)
def test_a_run_goes_on_after_a_signal(project, signals, every, code):
    """With a checkpoint, which one Ctrl-C always leaves; else a resume is refused."""
    path, run = project.config(steps=100_000, checkpoint={"every": every}), project.folder / "runs" / "run"
    process = project.start("train", path)
    assert any(re.match(r"step +3/", line) for line in process.stdout)
    for number in signals:
        process.send_signal(number)
        assert number == signal.SIGTERM or any("stopping after this step" in line for line in process.stdout)
    process.communicate(timeout=120)
    assert process.returncode == code
    found = audit(run)
    assert not found.violations
    assert (found.open > 0) == (signals == [signal.SIGTERM])  # nobody marks them
    steps = project.metrics()[-1]["step"] + 2
    resumed = project.run("train", path, "--resume", f"steps={steps}")
    if every or signals == [signal.SIGINT]:
        assert resumed.returncode == 0, resumed.stderr
        assert project.summary()["steps"] == steps
    else:
        assert resumed.returncode == 2 and "nothing to resume" in resumed.stderr
        assert project.run("train", path, "--overwrite", "steps=1").returncode == 0
    assert not audit(run).violations


@pytest.mark.chaos
def test_a_learner_that_gets_no_further_ends_the_run(project):
    (project.folder / "parts.py").write_text(
        "from antiphon.learning.torch_learner import TorchLearner\n\n\n"
        "class Learner(TorchLearner):\n"
        "    def step(self, batch):\n"
        "        return 1 / 0\n"
    )
    ended = project.run(
        "train", project.config(learner={"kind": "parts:Learner"}, checkpoint={"every": 1, "restarts": 2})
    )
    assert ended.returncode == 2 and "ZeroDivisionError" in ended.stderr
    assert ended.stdout.count("the run goes on at its last checkpoint") == 2
    assert not audit(project.folder / "runs" / "run").violations


@pytest.mark.chaos
def test_what_cannot_be_resumed_says_so(project):
    path = project.config()
    nothing = project.run("train", path, "--resume")
    assert nothing.returncode == 2 and "there is no run to resume" in nothing.stderr
    both = project.run("train", path, "--resume", "--overwrite")
    assert both.returncode == 2 and "not both" in both.stderr
    assert project.run("train", path, "steps=2").returncode == 0
    fewer = project.run("train", path, "--resume", "steps=1")  # has them already
    assert fewer.returncode == 0 and project.summary()["steps"] == 2, fewer.stderr
    checkpoints = project.folder / "runs" / "run" / "checkpoints"
    assert {each.name for each in checkpoints.iterdir()} == {"step_000000", "step_000002"}
    other = project.run("train", path, "--resume", "rollout.group_size=8")
    assert other.returncode == 2 and "rollout.group_size: was 4 and is 8 now" in other.stderr
    for file in (project.folder / "runs" / "run" / "checkpoints").rglob("state.json"):
        file.unlink()
    torn = project.run("train", path, "steps=3", "--resume")
    assert torn.returncode == 2 and "no checkpoint is whole" in torn.stderr and "step_000002/state.json" in torn.stdout
