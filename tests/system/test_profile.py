"""`profile`: torch's profiler on chosen steps of whole runs."""

import gzip
import json

import pytest

from antiphon.core.config import add_import_folder, load
from antiphon.core.errors import ConfigError
from antiphon.run import commands
from antiphon.run.config import RunConfig

pytestmark = pytest.mark.system

ONE, MESH = ["learner"], ["learner-rank-0", "learner-rank-1"]


def read_operations(path) -> set[str]:
    """Return the names of the operations of a Chrome trace."""
    with gzip.open(path) as file:
        return {event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "cpu_op"}


def list_files(project, name="run"):
    folder = project.folder / "runs" / name / "profile"
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("mesh", "rollout", "ranks"),
    [({}, {}, ONE), ({}, {"workers": 1}, ONE), ({"shard": 2}, {}, MESH), ({"pipeline": 2}, {}, MESH)],
    ids=["one rank", "rollout workers", "sharded", "pipeline"],
)
def test_each_rank_writes_a_trace_of_each_step(project, mesh, rollout, ranks):
    sections = {"model": {"path": "mytask:build_deep"}, "learner": {"mesh": mesh}, "rollout": rollout}
    done = project.run("train", project.config(**sections, steps=3, profile={"steps": [1, 3]}))
    assert done.returncode == 0, done.stderr
    assert list_files(project) == [f"step_00000{step}/{rank}.json.gz" for step in (1, 3) for rank in ranks]
    for rank in ranks:
        found = read_operations(project.folder / "runs" / "run" / "profile" / "step_000003" / f"{rank}.json.gz")
        assert {"aten::mm", "autograd::engine::evaluate_function: MmBackward0"} <= found
        assert any(name.startswith("Optimizer.step") or "adamw" in name for name in found)


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
    assert list_files(project, "profiled") == ["step_000002/learner.json.gz"]
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
