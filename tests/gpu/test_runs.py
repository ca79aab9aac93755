"""Whole runs on a GPU that learner and engines share in turns, and the learner's numbers there."""

import json

import pytest
import torch

from antiphon.inspect.audit import audit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# With one GPU an engine that goes on while the learner trains is on a core.
PLACEMENTS = {
    "co-located": {"placement.engine": "with learner"},
    "overlapping": {"placement.engine": "gpu:0, cpu:1", "engine.replicas": 2},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_learner_and_engine_take_turns_on_one_gpu(project, dtype):
    """Models are offloaded, caches given back: what is in use at the end of a turn is the other's."""
    path = project.config(
        placement={"learner": "gpu:0", "engine": "with learner", "reference": "with learner"},
        algorithm={"kl": {"coefficient": 0.01, "place": "loss"}},
        learner={"dtype": dtype},
        engine={"dtype": dtype},
        rollout={"async_ratio": 0},  # so that whatever differs is the devices' doing, and not age
        steps=4,
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    assert not audit(project.folder / "runs" / "run").violations
    limit = 1e-3 if dtype == "float32" else 0.05
    assert all(abs(step["learner/mismatch_kl"]) < limit for step in project.metrics())


@pytest.mark.driver
def test_vllm_leaves_its_gpu_to_the_learner(project, vllm_python):
    """Tokens come from the newest weights, though they were loaded while it slept."""
    options = {"gpu_memory_utilization": 0.3, "enforce_eager": True}
    path = project.config(
        model={"path": "mytask:build_wide"},
        placement={"learner": "gpu:0", "engine": "with learner"},
        engine={"kind": "vllm", "python": vllm_python, "max_length": 256, "slots": 4, "options": options},
        rollout={"async_ratio": 0, "timeout": 500, "sampling": {"max_tokens": 8}},
        record={"events": True},
        steps=4,
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    assert all(abs(step["learner/mismatch_kl"]) < 1e-3 for step in project.metrics())
    events = (project.folder / "runs" / "run" / "events.jsonl").read_text().splitlines()
    assert sum(event["event"] == "sleep" for event in map(json.loads, events)) == 4


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_only_the_engine_on_the_learners_gpu_sleeps(project, pytestconfig, placement):
    settings = {
        "placement.learner": "gpu:0",
        **placement,
        "sft.steps": 10,
        "steps": 10,
        "evaluation.minimum_accuracy": 0,
        "record.events": "true",
        "name": "run",
        "record.directory": project.folder / "runs",
    }
    recipe = pytestconfig.rootpath / "recipes" / "tiny_arithmetic" / "config.yaml"
    done = project.run("train", recipe, *(f"{key}={value}" for key, value in settings.items()))
    assert done.returncode == 0, done.stderr
    directory = project.folder / "runs" / "run"
    assert not audit(directory).violations
    assert project.summary()["steps"] == 10
    assert all(step["age/max"] <= 1 for step in project.metrics() if "age/max" in step)
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert {event["engine"] for event in events if event["event"] == "sleep"} == {0}
    served = {event["engine"] for event in events if event["event"] == "place"}
    assert served == set(range(placement.get("engine.replicas", 1)))


def test_a_mesh_needs_as_many_gpus_as_it_has_ranks(project):
    many = torch.cuda.device_count() + 1
    done = project.run(
        "train", project.config(learner={"mesh": {"shard": many}}, placement={"learner": f"gpu:0-{many - 1}"})
    )
    assert done.returncode == 2
    assert "placement.learner" in done.stderr
