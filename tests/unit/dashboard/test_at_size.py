"""What large runs take another way for gives the same answers as the plain way."""

import sqlite3
from contextlib import closing

import pytest

from antiphon.dashboard.index.store import TABLES
from antiphon.dashboard.views.rollouts import _read_histogram
from tests.unit.dashboard.sites import copy_run, make_run, open_dashboard, wait_until_indexed

FILTERS = [
    "status=trained&sort=longest",
    "status=failed",
    "age=1&sort=best",
    "score_min=0.5&tokens_min=20&sort=oldest",
    "tokens_max=30&status=trained&sort=worst",
    "q=two&status=trained",
    "q=two&status=trained&sort=best",
    "step=3&task=simulated",
]


@pytest.mark.parametrize("query", FILTERS)
def test_filters_find_the_same_with_and_without_indices(client, monkeypatch, query):
    pages = []
    for few in (-1, 1_000_000):
        monkeypatch.setattr("antiphon.dashboard.views.rollouts.FEW", few)
        pages.append(client.get(f"/api/rollouts/simulated?{query}").json())
    keys = [key for key in pages[0]["rows"][0] if key not in ("question", "answer")] if pages[0]["rows"] else []
    sort = {"longest": "tokens", "best": "score", "worst": "score", "oldest": "age"}.get(
        query.rpartition("sort=")[2], "id"
    )
    one, other = ([tuple(row[key] for key in keys) for row in page["rows"]] for page in pages)
    assert [row[sort] for row in pages[0]["rows"]] == [row[sort] for row in pages[1]["rows"]]
    if pages[0]["found"] <= 50:  # rows of equal rank may come in any order, so that a page may end at another one
        assert sorted(map(repr, one)) == sorted(map(repr, other))
    assert pages[0]["found"] == pages[1]["found"] > 0


def test_histogram_of_many_scores_has_the_newest():
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(TABLES)
        columns = "lineage, grp, sibling, try, task, prompt, epoch, status, started, begun, score"
        rows = [(0, row, 0, 0, "task", "prompt", 0, "trained", 0, 0.0, row) for row in range(6_000)]
        db.executemany(f"INSERT INTO attempts ({columns}) VALUES ({', '.join('?' * 11)})", rows)
        for where, values in (("1", []), ("1 AND a.status = ?", ["trained"]), ("1 AND +a.score >= ?", [1])):
            bins = _read_histogram(db, "attempts a", where, values)
            assert (bins[0][0], bins[-1][1], sum(count for _, _, count in bins)) == (1_000, 5_999, 5_000)


def test_timeline_of_many_spans_counts_a_part_of_them(client, monkeypatch):
    whole = client.get("/api/timeline/simulated").json()
    for name in ("MOST_SPANS", "MOST_ATTEMPTS"):
        monkeypatch.setattr(f"antiphon.dashboard.views.timeline.{name}", 20)
    part = client.get("/api/timeline/simulated").json()
    engines = [lane["name"] for lane in whole["lanes"] if lane["requests"]]
    assert engines == [lane["name"] for lane in part["lanes"] if lane["requests"]]
    counts = [sum(lane["requests"] for lane in page["lanes"]) for page in (whole, part)]
    assert counts[1] == pytest.approx(counts[0], rel=0.3)
    assert sum(part["running"]) == pytest.approx(sum(whole["running"]), rel=0.4)
    assert all(lane["busy"] is None for lane in part["lanes"] if lane["requests"])
    assert all(lane["busy"] is not None for lane in whole["lanes"])
    (learner,) = (lane for lane in part["lanes"] if lane["name"] == "learner")
    assert [span["label"] for span in learner["spans"]] == [f"step {number}" for number in range(1, 7)], "all of them"


def test_slow_engine_is_marked(tmp_path):
    slow = {"point": "engine.slow", "at": 0.1, "factor": 20.0}
    make_run(tmp_path / "runs", engines={"count": 3, "speed": {"slots": 8}}, faults=[slow])
    make_run(tmp_path / "runs", "even", engines={"count": 3, "speed": {"slots": 8}}, faults=[])
    with open_dashboard(tmp_path / "runs", tmp_path / "cache") as client:
        for name, count in (("simulated", 1), ("even", 0)):
            wait_until_indexed(client, name)
            while (page := client.get(f"/api/timeline/{name}").json())["reading"]:
                pass
            lanes = [lane for lane in page["lanes"] if lane["requests"]]
            assert len(lanes) == 3
            marked = [lane["seconds"] for lane in lanes if lane["is_slow"]]
            assert len(marked) == count
            assert all(seconds == max(lane["seconds"] for lane in lanes) for seconds in marked)


def test_first_page_of_a_run_does_not_wait_for_its_index(tmp_path, runs, monkeypatch):
    copy_run(runs / "simulated", tmp_path / "runs", "run")
    monkeypatch.setattr("antiphon.dashboard.index.worker.FIRST_SECONDS", 0.0)
    monkeypatch.setattr("antiphon.dashboard.index.worker.IndexWorker.start", lambda self: None)  # it never comes
    monkeypatch.setattr("antiphon.dashboard.index.worker.IndexWorker.close", lambda self: None)
    with open_dashboard(tmp_path / "runs", tmp_path / "cache") as client:
        for path in ("rollouts", "timeline", "run", "record"):
            assert client.get(f"/{path}/run").status_code == 200
        assert "index is being built" in client.get("/rollouts/run").text
        assert "data-poll" in client.get("/rollouts/run").text
