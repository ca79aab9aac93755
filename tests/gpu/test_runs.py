"""Whole runs on a GPU that learner and engines share in turns, and the learner's numbers there."""

import pytest
import torch

from antiphon.record.audit import audit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_learner_and_engine_take_turns_on_one_gpu(project, dtype):
    """Models are offloaded, caches given back: what is in use at the end of a turn is the other's."""
    path = project.config(
        placement={"learner": "gpu:0", "engine": "with learner", "reference": "with learner"},
        algorithm={"kl": {"coefficient": 0.01, "in_loss": True}},
        learner={"dtype": dtype},
        engine={"dtype": dtype},
        rollout={"async_ratio": 1},
        steps=4,
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    assert not audit(project.folder / "runs" / "run").violations
    limit = 1e-3 if dtype == "float32" else 0.05
    assert all(abs(step["learner/mismatch_kl"]) < limit for step in project.metrics())


def test_a_mesh_needs_as_many_gpus_as_it_has_ranks(project):
    many = torch.cuda.device_count() + 1
    done = project.run(
        "train", project.config(learner={"mesh": {"shard": many}}, placement={"learner": f"gpu:0-{many - 1}"})
    )
    assert done.returncode == 2
    assert "placement.learner" in done.stderr
