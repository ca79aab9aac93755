"""`profile`: chosen steps of whole runs, a file a process of each role."""

import gzip
import json

import pytest

from antiphon.core.config import add_import_folder, load
from antiphon.core.errors import ConfigError
from antiphon.run import commands
from antiphon.run.config import RunConfig

pytestmark = pytest.mark.system

ONE, MESH = ["learner"], ["learner-rank-0", "learner-rank-1"]
TRACE, TABLE = ".json.gz", ".txt"


def read_operations(path) -> set[str]:
    """Return the names of the operations of a Chrome trace."""
    with gzip.open(path) as file:
        return {event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "cpu_op"}


def list_files(project, name="run"):
    folder = project.folder / "runs" / name / "profile"
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("mesh", "rollout", "ranks", "beside"),
    [
        ({}, {}, ONE, ""),
        ({}, {"workers": 1}, ONE, "rollout-0-"),
        ({"shard": 2}, {}, MESH, ""),
        ({"pipeline": 2}, {}, MESH, ""),
    ],
    ids=["one rank", "rollout workers", "sharded", "pipeline"],
)
def test_each_process_writes_a_file_of_each_step(project, mesh, rollout, ranks, beside):
    sections = {"model": {"path": "mytask:build_deep"}, "learner": {"mesh": mesh}, "rollout": rollout}
    done = project.run("train", project.config(**sections, steps=3, profile={"steps": [1, 3]}))
    assert done.returncode == 0, done.stderr
    files = [*(f"{rank}{TRACE}" for rank in ranks), f"{beside}engine-0{TRACE}", f"{beside}grading-0-process-1{TABLE}"]
    assert list_files(project) == sorted(f"step_00000{step}/{file}" for step in (1, 3) for file in files)
    folder = project.folder / "runs" / "run" / "profile" / "step_000003"
    for rank in ranks:
        found = read_operations(folder / f"{rank}{TRACE}")
        assert {"aten::mm", "autograd::engine::evaluate_function: MmBackward0"} <= found
        assert any(name.startswith("Optimizer.step") or "adamw" in name for name in found)
    sampled = read_operations(folder / f"{beside}engine-0{TRACE}")
    assert "aten::mm" in sampled or "aten::linear" in sampled
    assert not any("Backward" in name for name in sampled)
    table = (folder / f"{beside}grading-0-process-1{TABLE}").read_text()
    assert "cumtime" in table and "mytask.py" in table


def train(project, *overrides, **sections) -> None:
    """Train with workers as threads."""
    path = project.config(**sections)
    add_import_folder(path)
    config = load(path, ("cluster.debug=true", "record.live=off", *overrides), model=RunConfig)
    assert commands.train(config, overwrite=True) == 0


def test_a_profile_changes_nothing_that_is_learned(project):
    same = {"rollout": {"deterministic": True}, "steps": 2}
    for name, steps in (("profiled", [2]), ("plain", [])):
        train(project, name=name, profile={"steps": steps}, **same)
    weights = [
        (project.folder / "runs" / name / "checkpoints" / "step_000002" / "model.safetensors").read_bytes()
        for name in ("profiled", "plain")
    ]
    assert weights[0] == weights[1]
    assert "step_000002/engine-0.json.gz" in list_files(project, "profiled")  # threads of one process have one trace
    assert not (project.folder / "runs" / "plain" / "profile").exists()


@pytest.mark.parametrize(
    ("profile", "key", "named"),
    [
        ({"steps": [2, 9]}, "profile.steps", ["9", "steps = 3"]),
        ({"memory": True}, "profile.memory", ["profile.steps"]),
        ({"steps": [1], "memory": True}, "profile.memory", ["CUDA", "learner.device"]),
    ],
)
def test_profiles_that_cannot_be_made_are_refused(project, profile, key, named):
    path = project.config(profile=profile, steps=3, learner={"device": "cpu"})
    with pytest.raises(ConfigError) as refused:
        load(path, model=RunConfig)
    assert refused.value.key == key
    assert all(word in str(refused.value) for word in named)


def test_profile_of_a_learner_of_ones_own_is_refused(project):
    path = project.config(profile={"steps": [1]}, steps=3, learner={"kind": "mytask:Learner"})
    with pytest.raises(ConfigError, match="torch") as refused:
        load(path, model=RunConfig)
    assert refused.value.key == "profile.steps"


def test_memory_without_a_gpu_is_refused_at_the_start(project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = project.run("train", project.config(profile={"steps": [2], "memory": True}))
    assert done.returncode != 0 and "profile.memory" in done.stderr and "CUDA" in done.stderr
    assert not (project.folder / "runs" / "run").exists()
