"""`profile.memory`: a snapshot of the GPU's memory beside the trace of a step."""

import gzip
import json
import pickle

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.driver
def test_profiled_step_has_kernels_and_allocations(project):
    done = project.run("train", project.config(profile={"steps": [2], "memory": True}))
    assert done.returncode == 0, done.stderr
    folder = project.folder / "runs" / "run" / "profile" / "step_000002"
    with gzip.open(folder / "learner.json.gz") as file:
        assert any(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])
    snapshot = pickle.loads((folder / "learner.memory.pickle").read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])
