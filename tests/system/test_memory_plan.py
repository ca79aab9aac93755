"""The estimate of a learner's memory, against what torch's tracker counts."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_estimate_is_within_a_tenth_of_what_is_tracked(tmp_path):
    """For a dense model and a mixture of experts, sharded, and a small one that is whole; with few layers, to be quick."""
    models = ("Qwen2.5-0.5B", "Llama-3.1-8B", "Qwen3-30B-A3B")
    command = [sys.executable, ROOT / "benchmarks" / "memory_plan.py", "--layers", "4", "--models", *models]
    done = subprocess.run([*command, "--out", tmp_path / "plan.json"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "plan.json").read_text())["figures"]
    assert figures["models"] == 3
    assert figures["worst_relative_error"] < 0.1, done.stdout
