"""Signals of reward hacking lead to the attempts that raised them; charts by task have every task."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from antiphon.dashboard.index import read_texts
from antiphon.record import trajectories
from antiphon.rollout.reward_monitor import find_alarms
from antiphon.tasks.base import FLAG_PREFIX
from tests.unit.dashboard.sites import copy_run, open_dashboard, read_lines, wait_until_indexed

WATCH = {  # measures of the last three of six steps
    "stuffed": [0.05, 0.2, 0.3],
    "length": [0.0, -0.8, -0.9],
    "duplicates": [0.6, 0.6, 0.1],
    "repetition": [0.5, 0.5, 0.5],
}


def flag_every_third(run):
    """Flag every third trajectory of a run and return the names of these attempts."""
    flagged = []
    for path in sorted((run / "rollouts").glob("*.parquet")):
        found = list(trajectories.read(path).values())
        for place in range(0, len(found), 3):
            meta = found[place].meta
            score = replace(meta.score, parts={**meta.score.parts, "answer": 1.0, f"{FLAG_PREFIX}stuffed": 1.0})
            found[place] = replace(found[place], meta=replace(meta, score=score))
            flagged.append(f"0:{meta.id.group}.{meta.id.sibling}.{meta.id.attempt}")
        trajectories.write(path, 0, found)
    return sorted(flagged)


@pytest.fixture(scope="module")
def site(runs, tmp_path_factory):
    """A client of the dashboard of a run with flags and alarms, its folder, and the names of the flagged attempts."""
    folder = tmp_path_factory.mktemp("alarms")
    run = copy_run(runs / "simulated", folder, "run")
    flagged = flag_every_third(run)
    lines = read_lines(run / "metrics.jsonl")
    for line in lines:
        line |= {"reward/task/one": line["step"] / 10, "reward/task/two": 0.5, "evaluation/one/score": 0.25}
    for place, line in enumerate(lines[-3:]):
        line |= {f"watch/simulated/{name}": values[place] for name, values in WATCH.items()}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with open_dashboard(folder, tmp_path_factory.mktemp("cache")) as client:
        wait_until_indexed(client, "run")
        yield client, run, flagged


def test_alarms_are_those_of_the_monitor(site):
    client, run, _ = site
    found = {each["measure"]: each for each in client.get("/api/run/run").json()["alarms"]}
    metrics = read_lines(run / "metrics.jsonl")
    raised = {}  # by the code that raises alarms during a run
    for line in metrics:
        watched = {key.split("/")[2]: value for key, value in line.items() if key.startswith("watch/simulated/")}
        for alarm in find_alarms("simulated", watched):
            raised.setdefault(alarm.name, []).append((line["step"], alarm.threshold))
    assert {name: (each["since"], each["steps"], each["threshold"]) for name, each in found.items()} == {
        name: (places[0][0], len(places), places[0][1]) for name, places in raised.items()
    }
    assert {name for name, each in found.items() if each["is_raised"]} == {
        alarm.name for alarm in find_alarms("", watched)
    }
    assert not found["duplicates"]["is_raised"] and "repetition" not in found
    assert found["length"]["samples"] == {"task": "simulated", "sort": "shortest"}


def test_a_flag_leads_to_all_attempts_that_have_it(site):
    client, run, flagged = site
    (alarm,) = [each for each in client.get("/api/run/run").json()["alarms"] if each["measure"] == "stuffed"]
    page = client.get("/api/rollouts/run", params=alarm["samples"]).json()
    with closing(sqlite3.connect(run / "ledger.db")) as ledger:
        query = "SELECT lineage || ':' || grp || '.' || sibling || '.' || try FROM attempts WHERE file IS NOT NULL"
        known = {row[0] for row in ledger.execute(query)}
    expected = sorted(known & set(flagged))
    assert page["found"] == len(expected)
    assert page["flags"] == {"stuffed": len(expected)}  # other parts of a score are no flags
    shown = [row["id"] for row in page["rows"]]
    assert shown and set(shown) <= set(expected)
    assert client.get("/api/rollouts/run?flag=nothing").json()["found"] == 0
    text = client.get("/run/run").text
    assert "flag=stuffed" in text and 'id="signals"' in text
    assert "stuffed" in client.get(f"/attempt/run?id={shown[0]}").text
    assert "stuffed" in client.get("/rollouts/run").text


def test_prefix_of_flags_is_that_of_tasks():
    assert read_texts.FLAG_PREFIX == FLAG_PREFIX


@pytest.mark.parametrize("meta", ['{"score": {"parts": 1}, "x": "mark/"}', '"mark/', '["mark/a"]', '{"mark/": []}'])
def test_damaged_facts_have_no_flags(meta):
    assert read_texts._read_flags(meta) == []


def test_charts_by_task_have_every_task(site):
    client, _, _ = site
    series = client.get("/api/chart/run?chart=tasks").json()["series"]
    assert {each["label"]: each["y"][-1] for each in series} == {"reward/task/one": 0.6, "reward/task/two": 0.5}
    series = client.get("/api/chart/run?chart=task_scores").json()["series"]
    assert [each["label"] for each in series] == ["evaluation/one/score"]
    assert {"tasks", "task_scores"} <= {each["id"] for each in client.get("/api/run/run").json()["charts"]}


def test_a_run_without_alarms_has_none(client):
    alarms = client.get("/api/run/simulated").json()["alarms"]
    assert all(each["measure"] in ("ungraded", "constant") for each in alarms)
