"""Each page shows what the run directory has, as the ledger and the files say it."""

import json
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from pydantic import TypeAdapter

from antiphon.dashboard.pages import PAGES
from antiphon.inspect.why import why
from antiphon.record import trajectories
from tests.unit.dashboard.sites import WORDS, copy_run, make_run, open_dashboard, read_lines, wait_until_indexed

FIFO = {"groups_per_step": 4, "group_size": 3, "sampling": {"max_tokens": 200}}


def ledger_of(runs):
    return closing(sqlite3.connect(runs / "simulated" / "ledger.db"))


def all_rows(client, **params):
    """All rows of a filter, page by page."""
    rows, page = [], 0
    while True:
        found = client.get("/api/rollouts/simulated", params={**params, "page": page}).json()
        rows += found["rows"]
        page += 1
        if page * 50 >= found["found"]:
            assert len(rows) == found["found"]
            return rows


# --- runs and one run --------------------------------------------------------------------------------------------------


def test_list_of_runs_has_states_and_results(tmp_path, runs):
    folder = tmp_path / "runs"
    copy_run(runs / "simulated", folder, "done")
    failed = copy_run(runs / "simulated", folder, "failed")
    with closing(sqlite3.connect(failed / "ledger.db")) as db:
        db.execute("UPDATE events SET detail = '{\"error\": \"the disk is full\"}' WHERE kind = 'end'")
        db.commit()
    killed = copy_run(runs / "simulated", folder, "group/killed")
    (killed / "summary.json").unlink()
    with closing(sqlite3.connect(killed / "ledger.db")) as db:
        db.execute("DELETE FROM events")
        db.commit()
    (copy_run(runs / "simulated", folder, "torn") / "config.yaml").write_text("{")
    summary = json.loads((folder / "done" / "summary.json").read_text())
    summary |= {"accuracy_before": 0.25, "accuracy_after": 0.75, "gain_interval": [0.4, 0.6], "alarms": {"x": 1}}
    (folder / "done" / "summary.json").write_text(json.dumps(summary))
    with open_dashboard(folder, tmp_path / "cache") as client:
        cards = {card["name"]: card for card in client.get("/api/runs").json()["runs"]}
        states = {name: card["state"] for name, card in cards.items()}
        assert states == {"done": "finished", "failed": "failed", "group/killed": "stopped", "torn": "damaged"}
        assert (cards["done"]["accuracy_before"], cards["done"]["accuracy_after"]) == (0.25, 0.75)
        assert (cards["done"]["step"], cards["done"]["steps"], cards["done"]["alarms"]) == (6, 6, 1)
        assert cards["failed"]["problem"] == "the disk is full"
        assert [each["name"] for each in client.get("/api/runs?state=failed").json()["runs"]] == ["failed"]
        assert [each["name"] for each in client.get("/api/runs?q=KILL").json()["runs"]] == ["group/killed"]
        assert [each["name"] for each in client.get("/api/runs?sort=name").json()["runs"]] == sorted(states)
        assert "No run matches" in client.get("/runs?q=nothing").text
        assert "config.yaml" in client.get("/run/torn").text and client.get("/run/group/killed").status_code == 200


def test_run_whose_process_holds_its_lock_is_running(tmp_path, runs):
    import fcntl

    run = copy_run(runs / "simulated", tmp_path / "runs", "alive")
    with open_dashboard(tmp_path / "runs", tmp_path / "cache") as client, (run / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert client.get("/api/runs").json()["runs"][0]["state"] == "running"
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert client.get("/api/runs").json()["runs"][0]["state"] == "finished"


def test_empty_folder_says_how_to_begin(tmp_path):
    (tmp_path / "runs").mkdir()
    with open_dashboard(tmp_path / "runs", tmp_path / "cache") as client:
        assert "antiphon demo" in client.get("/runs").text


def test_folder_of_one_run_shows_it(runs, tmp_path):
    with open_dashboard(runs / "simulated", tmp_path) as client:
        assert [run["name"] for run in client.get("/api/runs").json()["runs"]] == ["simulated"]


def test_run_page_has_charts_and_changed_settings(client, runs):
    page = client.get("/api/run/simulated").json()
    assert {"reward", "length", "age", "throughput", "waits"} <= {chart["id"] for chart in page["charts"]}
    settings = {each["key"]: (each["value"], each["default"]) for each in page["settings"]}
    assert settings["rollout.filter"] == ('"spread"', "null")
    assert "rollout.policy" not in settings
    metrics = read_lines(runs / "simulated" / "metrics.jsonl")
    figures = {figure["label"]: figure["value"] for figure in page["figures"]}
    assert figures["reward"] == metrics[-1]["reward/mean"]


def test_chart_has_the_values_of_the_file(client, runs):
    metrics = read_lines(runs / "simulated" / "metrics.jsonl")
    chart = client.get("/api/chart/simulated?chart=length").json()
    lines = {series["label"]: (series["x"], series["y"]) for series in chart["series"]}
    for name in ("length/mean", "length/max"):
        assert lines[name] == ([each["step"] for each in metrics], [each[name] for each in metrics])
    time = client.get("/api/chart/simulated?chart=reward&x=time").json()["series"][0]["x"]
    assert time == pytest.approx(np.cumsum([each["step/seconds"] for each in metrics]).tolist())
    assert client.get("/api/chart/simulated?chart=tokens/per_second").json()["series"]
    assert client.get("/api/chart/simulated?chart=nonsense").status_code == 404


def test_chart_as_svg_and_csv(client):
    svg = client.get("/svg/chart/simulated?chart=length")
    assert svg.headers["content-type"] == "image/svg+xml" and svg.text.count("<polyline") == 2
    csv = client.get("/csv/chart/simulated?chart=length").text.splitlines()
    assert csv[0] == "series,step,Length,low,high" and len(csv) == 13


def test_seeds_are_one_band_and_differences_are_listed(tmp_path):
    folder = tmp_path / "runs"
    for seed in (1, 2):
        make_run(folder, f"seed{seed}", events=False, seed=seed)
    make_run(folder, "fifo", events=False, rollout=FIFO)
    query = "run=seed1&run=seed2&run=fifo"
    with open_dashboard(folder, tmp_path / "cache") as client:
        page = client.get(f"/api/compare?{query}").json()
        settings = dict(page["settings"])
        assert settings["seed"] == ["1", "2", "0"]
        assert settings["rollout.order"] == ['"ready"', '"ready"', '"fifo"']
        series = client.get(f"/api/compared-chart?{query}&chart=reward&seeds=1").json()["series"]
        assert [(each["kind"], each["color"]) for each in series] == [("band", 0), ("line", 1)]
        one, two = (client.get(f"/api/chart/seed{seed}?chart=reward").json()["series"][0]["y"] for seed in (1, 2))
        assert series[0]["y"] == pytest.approx([(a + b) / 2 for a, b in zip(one, two, strict=True)])
        assert len(client.get(f"/api/compared-chart?{query}&chart=reward").json()["series"]) == 3
        assert client.get(f"/compare?{query}").status_code == 200
        assert client.get("/compare?run=nothing").status_code == 404


# --- rollouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "condition"),
    [
        ({}, "1"),
        ({"status": "filtered"}, "status = 'filtered'"),
        ({"status": "failed"}, "status = 'failed'"),
        ({"step": "3"}, "step = 3"),
        ({"score_min": "0.5"}, "score >= 0.5"),
        ({"score_max": "0.5", "tokens_min": "20"}, "score <= 0.5 AND tokens >= 20"),
        ({"tokens_max": "15", "group": "4"}, "tokens <= 15 AND grp = 4"),
        ({"task": "simulated", "lineage": "0"}, "1"),
        ({"task": "other"}, "0"),
    ],
)
def test_filters_find_what_the_ledger_has(client, runs, params, condition):
    query = "SELECT lineage || ':' || grp || '.' || sibling || '.' || try FROM attempts WHERE "
    with ledger_of(runs) as db:
        wanted = {name for (name,) in db.execute(query + condition)}
    assert {row["id"] for row in all_rows(client, **params)} == wanted


@pytest.mark.parametrize(
    ("low", "high", "key"), [("tokens_min", "tokens_max", "tokens"), ("score_min", "score_max", "score")]
)
def test_bounds_of_a_filter_belong_to_it(client, low, high, key):
    rows = [row for row in all_rows(client) if row[key] is not None]
    value = sorted(row[key] for row in rows)[len(rows) // 2]
    found = {row["id"] for row in all_rows(client, **{low: value, high: value})}
    assert found == {row["id"] for row in rows if row[key] == value}


@pytest.mark.parametrize(
    ("sort", "key", "reverse"),
    [("best", "score", True), ("worst", "score", False), ("longest", "tokens", True), ("shortest", "tokens", False)],
)
def test_rows_come_in_the_order_that_was_asked_for(client, sort, key, reverse):
    values = [row[key] for row in all_rows(client, sort=sort)]
    assert values == sorted(values, reverse=reverse)


def test_search_finds_what_the_files_say(client, runs):
    wanted = set()
    for path in (runs / "simulated" / "rollouts").glob("*.parquet"):
        for attempt, trajectory in trajectories.read(path).items():
            text = "".join(WORDS[token] for token in trajectory.segments[0].tokens)
            if "four<b>five</b> six" in text:
                wanted.add(f"0:{attempt}")
    found = {row["id"] for row in all_rows(client, q='"four<b>five</b> six"')}
    assert wanted and wanted <= found  # full-text search leaves out signs: it may find "five b six" too
    for sort in ("newest", "best"):
        assert {row["id"] for row in all_rows(client, q="two", status="trained", sort=sort)} == {
            row["id"] for row in all_rows(client, q="two") if row["status"] == "trained"
        }
    assert all_rows(client, q="absent") == []


def test_histogram_counts_all_scores(client, runs):
    with ledger_of(runs) as db:
        (count,) = db.execute("SELECT count(*) FROM attempts WHERE score IS NOT NULL").fetchone()
    assert sum(each[2] for each in client.get("/api/rollouts/simulated").json()["scores"]) == count


def test_attempt_page_has_every_token(client, runs):
    row = next(row for row in all_rows(client, status="trained"))
    page = client.get("/api/attempt/simulated", params={"id": row["id"], "color": "logprob"}).json()
    with ledger_of(runs) as db:
        numbers = [int(each) for each in row["id"].split(":")[1].split(".")]
        (file,) = db.execute("SELECT file FROM attempts WHERE grp = ? AND sibling = ? AND try = ?", numbers).fetchone()
    whole = trajectories.read(runs / "simulated" / "rollouts" / file)
    segment = next(each for attempt, each in whole.items() if list(attempt) == numbers).segments[0]
    tokens = [token for part in page["parts"] for token in part["tokens"]]
    assert [token["id"] for token in tokens] == segment.tokens.tolist()[:2000]
    assert "".join(token["text"] for token in tokens) == "".join(WORDS[each] for each in segment.tokens[:2000])
    sampled = [token for token in tokens if token["sampled"]]
    assert [token["logprob"] for token in sampled] == pytest.approx(
        segment.logprobs[segment.loss_mask].tolist()[: len(sampled)]
    )
    assert {token["level"] for token in tokens if not token["sampled"]} == {None}
    labels = dict(why(runs / "simulated", row["id"]))
    assert dict(page["causes"]) == {label: labels[label] for label, _ in page["causes"]}


def test_long_attempt_is_shown_in_pieces(client, monkeypatch):
    monkeypatch.setattr("antiphon.dashboard.views.attempt.MOST_TOKENS", 7)
    row = all_rows(client, sort="longest", status="trained")[0]
    whole, start = [], 0
    while True:
        page = client.get("/api/attempt/simulated", params={"id": row["id"], "from": start}).json()
        whole += [token["position"] for part in page["parts"] for token in part["tokens"]]
        start = page["stop"]
        if start == page["length"]:
            break
    assert whole == list(range(page["length"]))


def test_attempt_without_a_trajectory_says_why(client):
    row = next(row for row in all_rows(client, status="redundant") if row["tokens"] is None)
    page = client.get("/api/attempt/simulated", params={"id": row["id"]}).json()
    assert "aborted" in page["problem"] and page["parts"] == []
    assert client.get("/attempt/simulated", params={"id": row["id"]}).status_code == 200
    assert client.get("/attempt/simulated?id=0:99999.0.0").status_code == 404


def test_group_page_marks_what_the_best_lacks(client, runs):
    with ledger_of(runs) as db:
        query = "SELECT grp FROM attempts WHERE status = 'trained' GROUP BY grp HAVING max(score) > min(score)"
        (group,) = db.execute(query).fetchone()
    page = client.get("/api/group/simulated", params={"group": group}).json()
    best = next(each for each in page["siblings"] if each["id"] == page["reference"])
    assert best["score"] == max(each["score"] for each in page["siblings"] if each["score"] is not None)
    assert not any(differs for _, differs in best["pieces"])
    for each in page["siblings"]:
        if each["pieces"]:
            kept = "".join(text for text, differs in each["pieces"] if not differs)
            assert len(kept) <= len("".join(text for text, _ in best["pieces"]))


# --- record and timeline -----------------------------------------------------------------------------------------------


def audited(client, name):
    while (page := client.get(f"/api/record/{name}").json())["audit"]["state"] == "running":
        pass
    return page


def test_record_page_shows_audit_and_checkpoints(tmp_path, runs):
    run = copy_run(runs / "simulated", tmp_path / "runs", "run")
    newest = sorted(path.name for path in (run / "checkpoints").iterdir())[-1]
    shutil.copytree(run / "checkpoints" / newest, run / "checkpoints" / "step_000099")
    (run / "checkpoints" / "step_000099" / "state.json").write_text("torn")
    with open_dashboard(tmp_path / "runs", tmp_path / "cache") as client:
        page = audited(client, "run")
        states = {each["name"]: each["state"] for each in page["checkpoints"]}
        assert states[newest] == "whole" and states["step_000099"] == "torn"
        assert page["audit"]["state"] == "broken"
        assert any("step_000099" in violation for violation in page["audit"]["violations"])
        with closing(sqlite3.connect(run / "ledger.db")) as db:
            counts = dict(db.execute("SELECT status, count(*) FROM attempts GROUP BY 1"))
        assert page["audit"]["balance"]["0"] == counts
        assert [lineage["parent"] for lineage in page["lineages"]] == [None]


def test_resumed_run_has_a_tree_of_lineages(tmp_path):
    from antiphon.simulate.run import simulate
    from antiphon.simulate.scenario import ScenarioConfig
    from tests.unit.dashboard.sites import SCENARIO

    scenario = ScenarioConfig.model_validate(SCENARIO | {"name": "resumed"})
    simulate(scenario, keep=tmp_path / "runs")
    simulate(scenario.model_copy(update={"steps": 8}), keep=tmp_path / "runs", resume=True)
    with open_dashboard(tmp_path / "runs", tmp_path / "cache") as client:
        wait_until_indexed(client, "resumed")
        lineages = audited(client, "resumed")["lineages"]
        assert [(each["lineage"], each["parent"], each["depth"], each["cut"]) for each in lineages] == [
            (0, None, 0, 0),
            (1, 0, 1, 6),
        ]
        assert client.get("/timeline/resumed?lineage=0").status_code == 200


def test_timeline_shows_engines_and_learner(client, runs):
    page = client.get("/api/timeline/simulated").json()
    assert [lane["name"] for lane in page["lanes"]][:3] == ["learner", "engine 0", "engine 1"]
    steps = [span for span in page["lanes"][0]["spans"] if span["kind"] == "step"]
    assert len(steps) == 6
    middle = (page["first"] + page["last"]) / 2
    part = client.get(f"/api/timeline/simulated?start={page['first']}&stop={middle}").json()
    assert len(part["lanes"][0]["spans"]) < len(page["lanes"][0]["spans"])
    assert client.get(f"/timeline/simulated?start={page['first']}&stop={middle}").status_code == 200


def test_timeline_without_events_has_steps_and_attempts(tmp_path):
    make_run(tmp_path / "runs", "quiet", events=False)
    with open_dashboard(tmp_path / "runs", tmp_path / "cache") as client:
        wait_until_indexed(client, "quiet")
        page = client.get("/api/timeline/quiet").json()
        assert page["source"] == "ledger" and len(page["lanes"][0]["spans"]) == 6
        assert max(page["running"]) > 0
        assert "record.events" in client.get("/timeline/quiet").text


# --- for programs ------------------------------------------------------------------------------------------------------


def test_json_of_every_page_follows_its_schema(client):
    attempt = client.get("/api/rollouts/simulated?status=trained").json()["rows"][0]["id"]
    queries = {
        "/compare": "run=simulated&run=simulated",
        "/group/": "group=1",
        "/attempt/": f"id={attempt}",
        "/chart/": "chart=reward",
        "/compared-chart": "run=simulated&chart=reward",
    }
    schemas = client.get("/api/schema").json()
    for page in PAGES:
        name = "simulated" if page.path.endswith("/") else ""
        answer = client.get(f"/api{page.path}{name}?{queries.get(page.path, '')}")
        assert answer.status_code == 200, page.path
        TypeAdapter(page.result).validate_json(answer.content)
        assert (
            schemas[f"/api{page.path}{'{run}' if name else ''}"]["schema"]["properties"].keys() == answer.json().keys()
        )


def test_errors_of_the_api_are_json(client):
    for path, status in (("/api/run/nothing", 404), ("/api/nothing", 404), ("/api/rollouts/simulated?step=x", 400)):
        answer = client.get(path)
        assert answer.status_code == status and answer.json()["error"]
