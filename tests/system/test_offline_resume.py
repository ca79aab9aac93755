"""Offline runs that are killed, stopped and resumed: they end as if nothing had happened."""

import json
import signal
import textwrap

import numpy as np
import pytest
from safetensors.numpy import load_file

from antiphon.core.config import load
from antiphon.core.errors import ConfigError, RecordError
from antiphon.offline import run as offline
from antiphon.offline.config import DpoConfig
from antiphon.record.checkpoint import list_checkpoints
from tests.raising import raises_with
from tests.system.test_offline import VERBS, config

# The rows of each verb. At import, in the controller, they lay what MARK says.
ROWS = """
    import os
    import signal
    from pathlib import Path

    import psutil

    from antiphon.core import failpoints as points

    def pairs(split):
        return [
            {"prompt": f"{n % 10}+{n // 10}=", "chosen": str(n % 10) * (1 + n % 3), "rejected": "xy"} for n in range(20)
        ]

    def answers(split):
        return [{"prompt": f"{n % 10}+{n // 10}=", "response": str(n % 10) * (1 + n % 3)} for n in range(20)]

    def teacher(directory, seed):
        from mytask import build
        build(directory, seed, hidden_size=64, layers=2)

    def at(point, count, act):
        def look(reached, path):
            nonlocal count
            count -= reached == point
            if not count:
                points.watch(None)
                act()
        points.watch(look)

    def kill_learner():
        for child in psutil.Process().children(recursive=True):
            if "learner" in os.path.basename(os.readlink(f"/proc/{child.pid}/fd/1")):
                child.kill()

    mark = Path(__file__).with_name("mark")
    if mark.exists():
        said = mark.read_text().split()
        mark.unlink()
        match said:
            case ["kill", point, count]:
                points.arm(point, int(count))
            case ["learner", point, count]:
                at(point, int(count), kill_learner)
            case ["stop", point, count]:
                at(point, int(count), lambda: os.kill(os.getpid(), signal.SIGINT))
"""
SETTINGS = {
    "dpo": {"data": {"source": "rows:pairs"}, "validation": {"source": "rows:pairs", "limit": 4}},
    "reward-model": {"data": {"source": "rows:pairs"}, "validation": {"source": "rows:pairs", "limit": 4}},
    "distill": {
        "data": {"source": "rows:answers"},
        "validation": {"source": "rows:answers", "limit": 4},
        "distill": {"teacher": "rows:teacher"},
    },
}
STEPS = 9


def configure(project, verb):
    (project.folder / "rows.py").write_text(textwrap.dedent(ROWS))
    learner = {"tokens_per_pack": 40, "optimizer": {"learning_rate": 1e-2, "schedule": "linear"}}
    sections = {"steps": STEPS, "evaluate_every": 4, "checkpoint": {"every": 2}, "learner": learner}
    return config(project, verb, **SETTINGS[verb], **sections)


def start(project, verb, *overrides, mark=""):
    path = configure(project, verb)
    if mark:
        (project.folder / "mark").write_text(mark)
    return project.run(verb, path, "cluster.debug=false", *overrides)


def here(project, verb, *overrides, resume=False):
    """Run it in this process, its workers as threads."""
    kind, main = VERBS[verb]
    assert main(load(configure(project, verb), overrides, model=kind), resume=resume) == 0


def metrics(project, name):
    """The last line of each step, without what differs from run to run."""
    lines = {line["step"]: line for line in project.metrics(name)}
    kept = [lines[step] for step in sorted(lines)]
    return [{key: value for key, value in line.items() if key not in ("lineage", "learner/seconds")} for line in kept]


def weights(project, name):
    return load_file(project.folder / "runs" / name / "model" / "model.safetensors")


def assert_alike(project, one, other):
    assert metrics(project, one) == metrics(project, other)
    assert [line["step"] for line in metrics(project, one)] == list(range(1, STEPS + 1))
    first, second = weights(project, one), weights(project, other)
    assert first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
    validated = [{k: v for k, v in project.summary(name).items() if k != "seconds"} for name in (one, other)]
    assert validated[0] == validated[1]


@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=[] if verb == "dpo" else [pytest.mark.long]) for verb in VERBS]
)
def test_a_killed_run_ends_as_one_that_was_not(project, verb):
    """Killed before a checkpoint is in place, and again in the next life: what was not in place is done again."""
    here(project, verb, "name=whole")
    killed = start(project, verb, mark="kill checkpoint.publish 3")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [each.name for each in list_checkpoints(project.folder / "runs" / "run" / "checkpoints")][
        -1
    ] == "step_000002"
    killed = start(project, verb, "--resume", mark="kill checkpoint.prune 2")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = start(project, verb, "--resume")
    assert done.returncode == 0, done.stderr
    assert_alike(project, "whole", "run")
    assert {line["lineage"] for line in project.metrics("run")} == {0, 1, 2}


def test_a_run_goes_on_where_its_learner_died(project):
    here(project, "dpo", "name=whole")
    done = start(project, "dpo", mark="learner checkpoint.published 2")
    assert done.returncode == 0 and "the run goes on at its last checkpoint" in done.stderr + done.stdout
    assert_alike(project, "whole", "run")


def test_an_interrupted_run_leaves_a_checkpoint(project):
    here(project, "dpo", "name=whole")
    stopped = start(project, "dpo", mark="stop checkpoint.published 2")
    assert stopped.returncode == 130 and "--resume goes on" in stopped.stdout
    left = list_checkpoints(project.folder / "runs" / "run" / "checkpoints")[-1]
    assert not (project.folder / "runs" / "run" / "model").exists()
    assert len(metrics(project, "run")) == int(left.name.removeprefix("step_"))
    assert start(project, "dpo", "--resume").returncode == 0
    assert_alike(project, "whole", "run")


def test_a_run_that_has_ended_may_go_on_for_longer(project):
    rate = "learner.optimizer.schedule=constant"
    here(project, "dpo", "name=whole", rate)
    here(project, "dpo", rate, "steps=5")
    before = weights(project, "run")
    here(project, "dpo", rate, "steps=5", resume=True)  # nothing is left to do
    assert all(np.array_equal(before[name], array) for name, array in weights(project, "run").items())
    here(project, "dpo", rate, resume=True)
    assert weights(project, "run").keys() == before.keys() and len(metrics(project, "run")) == STEPS
    whole, longer = weights(project, "whole"), weights(project, "run")
    assert all(np.array_equal(whole[name], longer[name]) for name in whole)


def test_damage_is_told_and_the_checkpoint_before_is_taken(project, capsys):
    here(project, "dpo", "name=whole")
    here(project, "dpo")
    newest = list_checkpoints(project.folder / "runs" / "run" / "checkpoints")[-1]
    damaged = newest / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0\0")
    here(project, "dpo", resume=True)
    assert str(damaged) in capsys.readouterr().out
    assert_alike(project, "whole", "run")


def test_what_would_be_another_run_is_refused(project):
    here(project, "dpo")
    path = project.folder / "dpo.yaml"
    written = project.folder / "runs" / "run" / "config.yaml"
    before = written.read_bytes()
    with raises_with(ConfigError, key="batch_size", value=4, path=str(written)):
        offline.dpo(load(path, ["batch_size=4"], model=DpoConfig), resume=True)
    assert written.read_bytes() == before
    with raises_with(ConfigError, path=str(project.folder / "runs" / "none")):
        offline.dpo(load(path, ["name=none"], model=DpoConfig), resume=True)
    for checkpoint in list_checkpoints(project.folder / "runs" / "run" / "checkpoints"):
        (checkpoint / "MANIFEST.json").write_text(json.dumps({}))
    with raises_with(RecordError, path=project.folder / "runs" / "run" / "checkpoints"):
        offline.dpo(load(path, model=DpoConfig), resume=True)
    both = project.run("dpo", path, "--resume", "--overwrite")
    assert both.returncode == 2 and "not both" in both.stderr
