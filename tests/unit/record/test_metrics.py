"""Metrics: declared reductions, one line a step."""

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.record.metrics import Metrics, find_reduction
from antiphon.record.run_dir import remove_partial_line
from antiphon.record.safe_files import read_metrics

VALUES = st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0.01, 100)), min_size=1, max_size=20)


def reduced(name, entries, declared=None):
    with tempfile.TemporaryDirectory() as folder, Metrics(Path(folder) / "metrics.jsonl", declared) as metrics:
        for value, weight in entries:
            metrics.record(name, value, weight)
        return metrics.flush(1)[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reward/mean", "mean"),
        ("age/max", "max"),
        ("age_max", "max"),
        ("length/min", "min"),
        ("tokens/total", "sum"),
        ("failures/count", "sum"),
        ("cursor/last", "last"),
        ("learner/clip_fraction", "mean"),
        ("learner/climax", "mean"),  # a word, not its end
        ("groups/filtered", "sum"),
        ("learner/lr", "last"),
    ],
)
def test_the_reduction_is_declared_or_in_the_name(name, expected):
    assert find_reduction(name) == expected


def test_a_declaration_goes_before_the_name():
    assert reduced("age/max", [(1, 1), (3, 1)], {"age/max": "sum"}) == 4


@given(VALUES)
def test_the_mean_is_weighted(entries):
    values, weights = zip(*entries, strict=True)
    assert reduced("x", entries) == pytest.approx(np.average(values, weights=weights), rel=1e-9, abs=1e-6)


@given(VALUES, st.floats(0.1, 10))
def test_the_mean_does_not_depend_on_the_unit_of_weight(entries, scale):
    scaled = [(value, weight * scale) for value, weight in entries]
    assert reduced("x", entries) == pytest.approx(reduced("x", scaled), rel=1e-9, abs=1e-6)


@given(VALUES, st.randoms(use_true_random=False))
def test_all_but_last_do_not_depend_on_order(entries, random):
    shuffled = list(entries)
    random.shuffle(shuffled)
    for name in ("x", "x/sum", "x/max", "x/min"):
        assert reduced(name, entries) == pytest.approx(reduced(name, shuffled), rel=1e-9, abs=1e-6)


@given(VALUES)
def test_sums_and_extremes_are_those_of_the_values(entries):
    values = [value for value, _ in entries]
    assert reduced("x/sum", entries) == pytest.approx(math.fsum(values), abs=1e-6)
    assert (reduced("x/max", entries), reduced("x/min", entries)) == (max(values), min(values))
    assert reduced("x/last", entries) == values[-1]


def test_each_step_is_a_line_of_its_own_values(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as metrics:
        metrics.record_all({"reward/mean": 0.0, "loss": 2.0})
        metrics.record("reward/mean", 1.0, weight=3)
        assert metrics.flush(1) == {"loss": 2.0, "reward/mean": 0.75}
        metrics.record("loss", float("inf"))
        metrics.flush(2)
        metrics.flush(3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"step": 1, "lineage": 0, "loss": 2.0, "reward/mean": 0.75},
        {"step": 2, "lineage": 0, "loss": None},
        {"step": 3, "lineage": 0},
    ]


def test_phases_count_their_own_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as metrics:
        for counter in ("sft_step", "step"):
            metrics.record("x", 1.0)
            metrics.flush(1, counter)
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"sft_step": 1, "lineage": 0, "x": 1.0} and second == {"step": 1, "lineage": 0, "x": 1.0}
    assert read_metrics(tmp_path, 0, 1) == second


def test_a_mean_of_no_weight_is_unknown_not_zero(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        metrics.record("x", 5.0, weight=0)
        assert math.isnan(metrics.flush(1)["x"])
        with pytest.raises(ValueError, match="negative"):
            metrics.record("x", 5.0, weight=-1)


def test_a_line_that_a_killed_process_left_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    with Metrics(path, lineage=1) as metrics:
        metrics.flush(2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2, "lineage": 1}]


@pytest.mark.parametrize(("content", "kept"), [("x" * 200_000, 0), ("a\n" + "x" * 200_000, 2), ("a\nb\n", 4), ("", 0)])
def test_a_partial_line_may_be_long(tmp_path, content, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    remove_partial_line(path)
    assert path.read_text() == content[:kept]
