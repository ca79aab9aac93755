"""The benchmark of the learner on a GPU, as far as it goes without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(out, *options):
    """It, where torch finds no GPU."""
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "learner.py", "--out", out, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        timeout=600,
    )


def test_all_of_it_runs_with_a_tiny_model(tmp_path):
    done = run(tmp_path / "learner.json", "--tiny", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "learner.json").read_text())["figures"]
    for way in ("packed", "padded", "checkpointed", "full_logits", "shared", "plain"):
        assert figures[f"{way}_tokens_per_second"] > 0
    for ratio in ("packed_against_padded", "packed_against_full_logits", "shared_against_plain"):
        assert figures[f"{ratio}_speed"] > 0


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    done = run(tmp_path / "learner.json")
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout and "GPU" in done.stdout
    assert not any(tmp_path.iterdir())
