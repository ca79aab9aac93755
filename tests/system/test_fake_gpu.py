"""The tests for GPUs, on a fake GPU: what the package does on GPUs alone, where there is none."""

import subprocess
import sys

import pytest

WHOLE_RUNS = "tests/gpu/test_runs.py"
CHOSEN = {
    "no run": ["tests/gpu", "--deselect", WHOLE_RUNS],
    "a run": [f"{WHOLE_RUNS}::test_learner_and_engine_take_turns_on_one_gpu[float32]"],
    "all runs": [WHOLE_RUNS],
}


@pytest.mark.parametrize("chosen", ["no run", "a run", pytest.param("all runs", marks=pytest.mark.long)])
def test_what_runs_on_gpus_runs_on_a_fake_one(pytestconfig, chosen):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.fake_gpu", *CHOSEN[chosen]]
    done = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]
