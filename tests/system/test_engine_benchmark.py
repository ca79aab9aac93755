"""The benchmark of the native engine, as far as it goes without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_guesses_are_measured_with_a_tiny_model(tmp_path):
    out = tmp_path / "speculative.json"
    command = [
        sys.executable,
        ROOT / "benchmarks" / "speculative.py",
        "--tiny",
        "--pairs",
        "1",
        "--tokens",
        "12",
        "--out",
        out,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["figures"]
    assert figures["identical_tokens"] == figures["compared_tokens"] == 3 * 32 * 12
    assert figures["speedup_unlike_1"] > 0 and figures["speedup_repetitive"] >= figures["lowest_speedup"] > 0


def test_ratios_of_truncated_sampling_are_1(tmp_path):
    command = [
        sys.executable,
        ROOT / "benchmarks" / "truncated_sampling.py",
        "--tiny",
        "--pairs",
        "1",
        "--tokens",
        "20",
    ]
    done = subprocess.run([*command, "--out", tmp_path / "out.json"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert abs(figures["mean_ratio_by_support"] - 1) < 1e-3 < 0.3 < 1 - figures["mean_ratio_by_vocabulary"]


def test_all_of_it_runs_with_a_tiny_model(tmp_path):
    out = tmp_path / "engine.json"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "engine.py", "--tiny", "--pairs", "1", "--out", out],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["figures"]
    for against in ("generate_fixed", "generate_ragged", "continuous_batching_ragged"):
        assert figures[f"ratio_vs_{against}"] > 0
    assert figures["native_tokens_per_second_fixed"] > 0 and figures["native_tokens_per_second_ragged"] > 0
    assert figures["bandwidth_gb_per_second"] > 0
    assert 0 <= figures["share_of_bandwidth"] < 1  # so little is read that it may be 0.0000
