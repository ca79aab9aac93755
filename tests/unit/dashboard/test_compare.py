"""Runs beside each other: curves over versions, and first differences as `antiphon diff` tells them."""

import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest

from antiphon.dashboard import views
from tests.unit.dashboard.sites import copy_run, make_run, open_dashboard, read_lines


def change_ledger(run, statement):
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        db.execute(statement)
        db.commit()
        db.execute("PRAGMA journal_mode = DELETE")


@pytest.fixture(scope="module")
def folder(runs, tmp_path_factory):
    """A run, its copies — one with other versions, one with another score —, a seed, and a run without a ledger."""
    found = tmp_path_factory.mktemp("compared")
    copies = [copy_run(runs / "simulated", found, name) for name in ("one", "equal", "later", "scored", "bare")]
    change_ledger(copies[2], "UPDATE steps SET version = version + 30")
    change_ledger(copies[3], "UPDATE attempts SET score = score + 1 WHERE step = 4")
    for path in copies[4].glob("ledger.db*"):
        path.unlink()
    make_run(found, "seed", events=False, seed=9)
    return found


@pytest.fixture(scope="module")
def dashboard(folder, tmp_path_factory):
    with open_dashboard(folder, tmp_path_factory.mktemp("cache")) as found:
        yield found


def compare(client, *names, **params):
    """Return the differences of the page once all are known."""
    while True:
        page = client.get("/api/compare", params={"run": list(names), **params})
        found = dict(page.json()["differences"])
        if all(each["state"] != "running" for each in found.values()):
            return found
        time.sleep(0.02)  # a thread looks for them, and tells nobody when it is done


def test_curve_over_versions_begins_at_the_first_one_of_the_loop(dashboard, folder):
    rewards = [line["reward/mean"] for line in read_lines(folder / "later" / "metrics.jsonl")]
    (series,) = dashboard.get("/api/chart/later?chart=reward&x=version").json()["series"]
    assert (series["x"], series["y"]) == ([31, 32, 33, 34, 35, 36], rewards)
    assert ">version</text>" in dashboard.get("/svg/chart/later?chart=reward&x=version").text
    (series,) = dashboard.get("/api/chart/bare?chart=reward&x=version").json()["series"]
    assert series["x"] == []


def test_seeds_are_averaged_where_both_have_versions(dashboard):
    query = "run=one&run=later&run=bare&chart=reward&x=version"
    assert [each["x"][0] for each in dashboard.get(f"/api/compared-chart?{query}").json()["series"] if each["x"]] == [
        1,
        31,
    ]
    (band,) = dashboard.get(f"/api/compared-chart?{query}&seeds=1").json()["series"]
    assert (band["kind"], band["x"]) == ("band", [])  # no version is in both


def test_first_differences_are_those_of_the_command(dashboard, folder):
    found = compare(dashboard, "one", "equal", "scored", "later", "seed")
    assert list(found) == ["equal", "scored", "later", "seed"]
    assert found["equal"] == {"state": "none", "text": ""}
    assert found["scored"]["text"].startswith("step 4: ") and "score" in found["scored"]["text"]
    assert "seed" in found["seed"]["text"]
    for name in ("equal", "scored", "seed"):
        command = [sys.executable, "-m", "antiphon", "diff", folder / "one", folder / name]
        printed = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        assert " ".join(printed.split()) == " ".join((found[name]["text"] or "no difference").split())
    page = dashboard.get("/compare?run=one&run=scored&run=equal").text
    assert "no difference" in page and "step 4: " in page


def test_unreadable_run_says_so_and_the_page_stays(dashboard):
    assert compare(dashboard, "seed", "bare")["bare"]["state"] == "unasked"
    found = compare(dashboard, "one", "bare", diff="1")
    assert found["bare"]["state"] == "unreadable" and "ledger.db" in found["bare"]["text"]
    assert dashboard.get("/compare?run=one&run=bare&diff=1").status_code == 200


def test_large_runs_are_compared_on_request(dashboard, monkeypatch):
    monkeypatch.setattr(views.compare, "SMALL", 0)
    assert compare(dashboard, "later", "one")["one"]["state"] == "unasked"
    assert "Look for it" in dashboard.get("/compare?run=later&run=one").text
    assert compare(dashboard, "later", "one", diff="1")["one"]["state"] == "found"


def test_difference_is_looked_for_again_when_a_run_has_changed(dashboard, folder):
    run = copy_run(folder / "one", folder, "changing")
    while "changing" not in str(dashboard.get("/api/runs").json()["runs"]):
        time.sleep(0.1)  # the list of runs is read again after two seconds
    assert compare(dashboard, "one", "changing")["changing"]["state"] == "none"
    change_ledger(run, "UPDATE attempts SET score = score + 1 WHERE step = 2")
    assert compare(dashboard, "one", "changing")["changing"]["state"] == "found"
