"""Metrics of a run as a table: steps that were done again, warm starts, a line that is being written, missing packages."""

import json
import sys

import pytest

from antiphon.core.errors import ConfigError, RecordError, UnsupportedError
from antiphon.record.metrics_table import plot_metric, read_metrics_table
from tests.raising import raises_with


def write(folder, *lines, tail=""):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def test_the_last_line_of_a_step_counts(tmp_path):
    lines = [{"step": step, "lineage": 0, "reward/mean": step / 10} for step in (1, 2, 3)]
    table = read_metrics_table(
        write(tmp_path, *lines, {"step": 2, "lineage": 1, "reward/mean": 0.9}, tail='{"step": 4')
    )
    # Step 3 was undone with step 2, and not done again.
    assert list(table.index) == [1, 2] and list(table["reward/mean"]) == [0.1, 0.9]


@pytest.mark.parametrize("counter", ["sft_step", "step"])  # the second, of runs that were made before the first
def test_a_warm_start_has_steps_of_its_own(tmp_path, counter):
    warm = [{counter: 1, "lineage": 0, "sft/loss": 2.0}]
    assert list(read_metrics_table(write(tmp_path, *warm))["sft/loss"]) == [2.0]
    table = read_metrics_table(write(tmp_path, *warm, {"step": 1, "lineage": 0, "reward/mean": 0.5}))
    assert list(table.columns) == ["lineage", "reward/mean"]


def test_a_run_that_has_no_step_yet_has_an_empty_table(tmp_path):
    assert len(read_metrics_table(write(tmp_path))) == 0
    with raises_with(ConfigError, key="metric"):
        plot_metric(tmp_path)


def test_a_plot_shows_the_metric_and_its_mean_over_ten(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    rewards = [0.0] * 10 + [1.0] * 5
    axes = plot_metric(write(tmp_path, *({"step": n, "reward/mean": r} for n, r in enumerate(rewards, 1))))
    plain, mean = axes.lines
    assert list(plain.get_xdata()) == list(mean.get_xdata()) == list(range(1, 16))
    assert list(plain.get_ydata()) == rewards
    assert list(mean.get_ydata()) == pytest.approx([0.0] * 10 + [0.1, 0.2, 0.3, 0.4, 0.5])
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("step", "reward/mean", tmp_path.name)


def test_damage_and_missing_packages_are_named(tmp_path, monkeypatch):
    with pytest.raises(RecordError):
        read_metrics_table(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("[]\n")
    with pytest.raises(RecordError):
        read_metrics_table(tmp_path)
    write(tmp_path, {"step": 1, "reward/mean": 1.0})
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with raises_with(UnsupportedError, value="matplotlib"):
        plot_metric(tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with raises_with(UnsupportedError, value="pandas"):
        read_metrics_table(tmp_path)
