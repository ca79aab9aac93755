"""`antiphon plot`: the dashboard's charts as files, without a browser."""

import csv
import io
import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread

from antiphon.core.errors import ConfigError, RecordError
from antiphon.dashboard.errors import NotFoundError
from antiphon.dashboard.plot import plot_runs
from tests.unit.dashboard.sites import copy_run, read_lines


def change_run(run, seed, add):
    """Give a copy of a run another seed, and add a number to its rewards."""
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"^seed: .*$", f"seed: {seed}", config, flags=re.MULTILINE))
    lines = [{**line, "reward/mean": line["reward/mean"] + add} for line in read_lines(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def seeds(runs, tmp_path):
    """Three copies of a run: two seeds whose rewards differ by 1, and the run itself."""
    return [change_run(copy_run(runs / "simulated", tmp_path, f"seed{add}"), 5 + add, add) for add in (0, 1)]


def read_rows(path):
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_csv_has_the_values_of_the_metrics(runs, tmp_path):
    plot_runs([runs / "simulated"], tmp_path / "out.csv")
    metrics = read_lines(runs / "simulated" / "metrics.jsonl")
    rows = read_rows(tmp_path / "out.csv")
    assert [(float(row["step"]), float(row["Reward"])) for row in rows] == [
        (line["step"], line["reward/mean"]) for line in metrics
    ]


def test_seeds_are_their_mean_and_a_band(seeds, tmp_path):
    plot_runs(seeds, tmp_path / "out.csv", seeds=True)
    metrics = read_lines(seeds[0] / "metrics.jsonl")
    rows = read_rows(tmp_path / "out.csv")
    assert len({row["series"] for row in rows}) == 1
    for row, line in zip(rows, metrics, strict=True):
        reward = line["reward/mean"]
        assert [float(row[name]) for name in ("Reward", "low", "high")] == pytest.approx(
            [reward + 0.5, reward, reward + 1]
        )
    plot_runs(seeds, tmp_path / "out.csv")
    assert {row["series"] for row in read_rows(tmp_path / "out.csv")} == {"seed0", "seed1"}


def test_svg_is_that_of_the_page(client, runs, tmp_path):
    plot_runs([runs / "simulated"], tmp_path / "out.svg", chart="length", axis="time")
    page = client.get("/svg/chart/simulated?chart=length&x=time")
    assert (tmp_path / "out.svg").read_text() == page.text
    assert ElementTree.parse(tmp_path / "out.svg").getroot().tag.endswith("svg")


def test_png_shows_a_curve_in_its_color(runs, tmp_path):
    plot_runs([runs / "simulated"], tmp_path / "out.png")
    pixels = (imread(tmp_path / "out.png")[:, :, :3] * 255).round()
    assert (pixels == (0x2F, 0x6F, 0x8F)).all(axis=2).sum() > 100


def test_png_without_matplotlib_is_one_clear_error(runs, tmp_path):
    program = (
        "import sys; sys.modules['matplotlib'] = None; sys.argv[0] = 'antiphon'; import antiphon.cli.app as a; a.main()"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, "plot", runs / "simulated", "--out", tmp_path / "out.png"],
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert "matplotlib" in found.stderr and found.stderr.count("\n") == 1
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize(
    ("change", "error", "key"),
    [
        ({"out": "out.gif"}, ConfigError, "--out"),
        ({"out": "missing/out.csv"}, ConfigError, "--out"),
        ({"axis": "day"}, ConfigError, "--x"),
        ({"chart": "nothing"}, NotFoundError, None),
        ({"chart": "learner/nothing"}, ConfigError, "--chart"),
        ({"runs": ["nothing"]}, RecordError, None),
        ({"runs": ["simulated"] * 21}, ConfigError, "RUN"),
    ],
)
def test_mistakes_are_told(runs, tmp_path, change, error, key):
    names = change.get("runs", ["simulated"])
    others = {name: value for name, value in change.items() if name not in ("runs", "out")}
    with pytest.raises(error) as caught:
        plot_runs([runs / name for name in names], tmp_path / change.get("out", "out.csv"), **others)
    assert getattr(caught.value, "key", None) == key
    assert not list(tmp_path.iterdir())


def test_runs_of_one_name_are_told_apart(runs, tmp_path):
    other = copy_run(runs / "simulated", tmp_path, "simulated")
    plot_runs([runs / "simulated", other], tmp_path / "out.csv")
    assert {row["series"] for row in read_rows(tmp_path / "out.csv")} == {str(runs / "simulated"), str(other)}
