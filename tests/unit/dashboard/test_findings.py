"""What stands out in a run is found where it was planted, and leads to its samples."""

import json
import sqlite3
from contextlib import closing
from urllib.parse import parse_qs

import pytest

from antiphon.dashboard.curves import MetricTable
from antiphon.dashboard.views.findings import list_findings
from tests.unit.dashboard.sites import copy_run, open_dashboard, wait_until_indexed


def make_table(**columns):
    table = MetricTable()
    for step, values in enumerate(zip(*columns.values(), strict=True), 1):
        table.add(step, 0, {name.replace("__", "/"): value for name, value in zip(columns, values, strict=True)})
    return table


def find(run, table=None, alarms=None):
    return {
        each.text: {key: value[0] for key, value in parse_qs(each.query).items()}
        for each in list_findings(run, table or MetricTable(), alarms)
    }


def test_greatest_fall_of_the_reward_is_found(tmp_path):
    reward = [0.1, 0.2, 0.3, 0.4, 0.5, 0.05, 0.1, 0.2]
    ((text, query),) = find(tmp_path, make_table(reward__mean=reward)).items()
    assert query == {"step": "6", "sort": "worst"}
    assert "0.5" in text and "0.05" in text


@pytest.mark.parametrize("reward", [[0.1, 0.2, 0.3, 0.4], [0.5] * 5, [0.5, 0.6, 0.5, 0.6, 0.5], [0.5], []])
def test_noise_and_growth_are_no_fall(tmp_path, reward):
    assert find(tmp_path, make_table(reward__mean=reward)) == {}


def test_steps_without_a_reward_do_not_hide_a_fall(tmp_path):
    found = find(tmp_path, make_table(reward__mean=[0.5, float("nan"), 0.52, 0.51, float("nan"), 0.1, 0.12]))
    assert [query["step"] for query in found.values()] == ["6"]


def test_worst_truncation_is_found(tmp_path):
    found = find(tmp_path, make_table(length__truncated=[0.0, 0.2, 0.75, 0.1]))
    assert list(found.values()) == [{"step": "3", "sort": "longest"}]
    assert find(tmp_path, make_table(length__truncated=[0.0, 0.05])) == {}


@pytest.mark.parametrize("alarms", [None, [], "text", 3, {}])
def test_no_alarm_is_no_finding(tmp_path, alarms):
    assert find(tmp_path, alarms=alarms) == {}


def test_alarm_leads_to_its_task_and_step(tmp_path):
    found = find(tmp_path, alarms={"addition: repetition": 12, 3: None})
    assert next(iter(found.values())) == {"step": "12", "task": "addition", "sort": "best"}


def test_ledger_says_what_was_dropped_undone_and_lost(tmp_path, runs):
    run = copy_run(runs / "simulated", tmp_path, "run")
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        counts = dict(db.execute("SELECT status, count(*) FROM attempts GROUP BY status"))
        db.execute("UPDATE steps SET undone = 1 WHERE step IN (5, 6)")
        db.execute("INSERT INTO events (lineage, second, kind, detail) VALUES (0, 12.5, 'lost', '{\"engine\": 1}')")
        db.commit()
    found = find(run)
    for status in ("failed", "stale"):
        texts = [text for text, query in found.items() if query.get("status") == status]
        assert len(texts) == bool(counts.get(status))
        assert all(text.startswith(f"{counts[status]} attempts") for text in texts)
    assert any("2 steps between 5 and 6 were undone" in text for text in found)
    assert [query for text, query in found.items() if "Engine 1 was lost" in text] == [
        {"lineage": "0", "start": "0.0", "stop": "42.5"}
    ]


def test_page_shows_findings_and_their_links_lead_somewhere(tmp_path, runs):
    run = copy_run(runs / "simulated", tmp_path / "runs", "run")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"alarms": {"<b>simulated</b>: repetition": 2}}))
    with open_dashboard(tmp_path / "runs", tmp_path / "cache") as client:
        wait_until_indexed(client, "run")
        page = client.get("/run/run").text
        assert "&lt;b&gt;simulated" in page and "<b>simulated" not in page
        for each in client.get("/api/run/run").json()["findings"]:
            assert client.get(f"{each['path']}run?{each['query']}").status_code == 200
