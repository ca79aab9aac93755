"""Metrics are followed as the file grows, and curves keep what matters in few points."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.dashboard.curves import (
    MOST_STEPS,
    Metrics,
    MetricsCache,
    MetricTable,
    average_seeds,
    downsample,
    rolling_mean,
)


def write(run, *lines, mode="a"):
    with (run / "metrics.jsonl").open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def step(number, lineage=0, **metrics):
    return {"step": number, "lineage": lineage, **{name.replace("__", "/"): value for name, value in metrics.items()}}


def test_new_lines_are_read_without_the_old_ones(tmp_path):
    write(tmp_path, step(1, reward__mean=0.1))
    metrics = Metrics(tmp_path)
    metrics.follow()
    (tmp_path / "metrics.jsonl").write_bytes(b"#" * (tmp_path / "metrics.jsonl").stat().st_size)  # is not read again
    write(tmp_path, step(2, reward__mean=0.2))
    metrics.follow()
    assert metrics.training.steps == [1, 2]
    assert metrics.training.column("reward/mean").tolist() == [0.1, 0.2]
    assert metrics.damaged == 0


def test_half_a_line_is_left_for_later(tmp_path):
    metrics = Metrics(tmp_path)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.write('{"step": 1, "lineage": 0, "rew')
        file.flush()
        metrics.follow()
        assert len(metrics.training) == 0
        file.write('ard/mean": 0.5}\n')
        file.flush()
        metrics.follow()
    assert metrics.training.last("reward/mean") == 0.5


def test_replaced_file_is_read_anew(tmp_path):
    metrics = Metrics(tmp_path)
    write(tmp_path, step(1, reward__mean=0.1), step(2, reward__mean=0.2))
    metrics.follow()
    write(tmp_path, step(1, reward__mean=0.9), mode="w")
    metrics.follow()
    assert metrics.training.column("reward/mean").tolist() == [0.9]


def test_undone_steps_are_forgotten(tmp_path):
    metrics = Metrics(tmp_path)
    write(tmp_path, *(step(number, reward__mean=0.0) for number in range(1, 6)))
    write(tmp_path, step(3, lineage=1, reward__mean=1.0))
    metrics.follow()
    assert metrics.training.steps == [1, 2, 3]
    assert metrics.training.column("reward/mean").tolist() == [0, 0, 1]


def test_warm_start_is_counted_apart(tmp_path):
    metrics = Metrics(tmp_path)
    write(
        tmp_path,
        {"sft_step": 5, "lineage": 0, "sft/loss": 2.0},
        {"step": 6, "sft/loss": 1.5},
        step(1, reward__mean=0.1),
    )
    metrics.follow()
    assert (metrics.supervised.steps, metrics.training.steps) == ([5, 6], [1])


def test_damaged_lines_are_counted(tmp_path):
    metrics = Metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('nonsense\n[1, 2]\n{"step": "x"}\n{}\n' + "[" * 100_000 + "\n")
    write(tmp_path, step(1, reward__mean=0.1, other="text", more=None))
    metrics.follow()
    assert metrics.damaged == 5
    assert metrics.training.steps == [1]


def test_memory_of_a_long_run_is_bounded():
    table = MetricTable()
    for number in range(3 * MOST_STEPS):
        table.add(number, 0, {"reward/mean": float(number), "step/seconds": 1.0})
    assert len(table) <= MOST_STEPS
    assert table.column("reward/mean").tolist() == [float(number) for number in table.steps]
    assert table.seconds()[-1] == pytest.approx(3 * MOST_STEPS, rel=0.001)
    assert table.nbytes < 8 << 20


def test_cache_forgets_the_run_that_was_read_first(tmp_path, monkeypatch):
    monkeypatch.setattr("antiphon.dashboard.curves.MOST_BYTES", 20_000)
    cache = MetricsCache()
    runs = [tmp_path / str(number) for number in range(5)]
    for run in runs:
        run.mkdir()
        write(run, step(1, reward__mean=0.5))
        assert cache.read(run).training.last("reward/mean") == 0.5
    assert list(cache._runs) == runs[-1:]


@given(st.lists(st.floats(-100, 100) | st.just(float("nan")), max_size=300), st.integers(4, 40))
def test_downsampled_curve_keeps_extremes(values, points):
    y = np.array(values, np.float64)
    px, py = downsample(np.arange(len(y), dtype=np.float64), y, points)
    known = y[np.isfinite(y)]
    assert len(px) == len(py) <= max(points, 2)
    assert px == sorted(px)
    if len(known):
        assert (min(py), max(py)) == (known.min(), known.max())
    assert all(y[int(place)] == value for place, value in zip(px, py, strict=True))


@given(st.lists(st.floats(-100, 100) | st.just(float("nan")), min_size=1, max_size=60), st.integers(1, 10))
def test_rolling_mean_equals_its_definition(values, window):
    found = rolling_mean(np.array(values), window)
    for place, value in enumerate(values):
        part = [each for each in values[max(place + 1 - window, 0) : place + 1] if np.isfinite(each)]
        if np.isfinite(value):
            assert found[place] == pytest.approx(np.mean(part), abs=1e-9)
        else:
            assert np.isnan(found[place])


def test_seeds_are_averaged_where_all_are_known():
    x = [np.array([1.0, 2, 3, 4]), np.array([2.0, 3, 4, 5])]
    y = [np.array([0.0, 1, 2, 3]), np.array([3.0, 4, 5, 6])]
    band = average_seeds(x, y, 100)
    assert band == {"x": [2, 3, 4], "mean": [2, 3, 4], "low": [1, 2, 3], "high": [3, 4, 5]}
    assert average_seeds([np.array([1.0]), np.array([2.0])], [np.array([1.0]), np.array([2.0])], 9)["x"] == []


def test_star_matches_one_part_of_a_name():
    table = MetricTable()
    table.add(
        1, 0, {"watch/a/constant": 0.1, "watch/b/constant": 0.2, "watch/a/b/constant": 0.3, "watch/constant": 0.4}
    )
    assert table.match("watch/*/constant") == ["watch/a/constant", "watch/b/constant"]
    assert table.match("watch/none") == []
