"""The page of a run now: what it shows follows from `live.json`, the lock and the ledger, whatever these hold."""

import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from antiphon.dashboard.hold_ups import find_hold_ups, list_waits
from antiphon.dashboard.live import WATCHED
from antiphon.dashboard.live_file import Engine, read_live_state
from tests.unit.dashboard.live_states import STATE, held, wait_of, write_state
from tests.unit.dashboard.sites import copy_run, open_dashboard
from tests.unit.dashboard.test_hostile_texts import HOSTILE, Inspector


@pytest.fixture
def run(runs, tmp_path):
    """A copy of the simulated run, alone in a folder."""
    return copy_run(runs / "simulated", tmp_path / "runs", "now")


@pytest.fixture
def site(run, tmp_path):
    """A client of its dashboard."""
    with open_dashboard(run.parent, tmp_path / "cache") as found:
        yield found


def state_of(run, **changes):
    write_state(run, **changes)
    found = read_live_state(run)
    assert found is not None
    return found


def query(site):
    return site.get("/api/now/now").json()


def test_pulse_tells_life_from_silence_and_end(site, run):
    assert query(site)["pulse"] == "unknown"
    with held(run):
        assert query(site)["pulse"] == "starting"
        write_state(run)
        assert query(site)["pulse"] == "live"
        write_state(run, quiet=60)
        assert query(site)["pulse"] == "stalled"
    assert query(site)["pulse"] == "ended"


def test_state_of_an_earlier_life_is_not_taken_for_the_present_one(site, run):
    write_state(run)
    with closing(sqlite3.connect(run / "ledger.db")) as db, held(run):
        assert query(site)["pulse"] == "live"
        db.execute("INSERT INTO lineages (lineage, parent, cut, version, code) VALUES (1, 0, 4, 4, 'x')")
        db.commit()
        found = query(site)
    assert found["pulse"] == "starting"
    assert found["events"] == [{"ago": None, "kind": "resume", "text": "resumed after step 4 as lineage 1"}]


def test_page_shows_load_versions_and_window(site, run):
    write_state(run)
    with held(run):
        found, text = query(site), site.get("/now/now").text
    assert found["state"]["rate"] == pytest.approx(3000 / 20)
    assert [(each["name"], each["behind"]) for each in found["state"]["engines"]] == [("engine 0", 0), ("engine 1", 1)]
    assert (found["ready"], found["grading"], found["in_environments"]) == (1, 0, None)
    assert found["learner"] == {
        "activity": "trains",
        "is_working": True,
        "seconds": 1.5,
        "busy": pytest.approx(2 / 3),
    }
    for group, age, state, finished in STATE["groups"]:
        assert f"group {group}: {state}, {finished} of 3 attempts finished, age {age}" in text
    assert len(re.findall(r'class="group free"', text)) == STATE["capacity"] - STATE["groups_alive"]
    assert "version 6: 1 to load" in text


def test_events_have_the_steps_of_the_ledger_newest_first(site, run):
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        (step, version, published) = db.execute(
            "SELECT step, version, published FROM steps ORDER BY step DESC LIMIT 1"
        ).fetchone()
    write_state(run, second=published + 50)
    events = query(site)["events"]
    agos = [event["ago"] for event in events]
    assert agos == sorted(agos)
    newest = next(event for event in events if event["kind"] == "step")
    assert newest["text"].startswith(f"step {step} published version {version} after ")
    assert newest["ago"] == pytest.approx(50, abs=5)  # and the seconds since the file was written


def test_time_to_the_end_is_told_while_it_runs(site, run):
    text = (run / "config.yaml").read_text()
    assert "\nsteps: 6\n" in text
    (run / "config.yaml").write_text(text.replace("\nsteps: 6\n", "\nsteps: 16\n"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    mean = sum(line["step/seconds"] for line in lines) / len(lines)
    assert query(site)["remaining"] is None
    with held(run):
        assert query(site)["remaining"] == pytest.approx(10 * mean)


# --- who holds up whom -------------------------------------------------------------------------------------------------

LEARNER_WAITS = wait_of("groups", owner="learner")


@pytest.mark.parametrize(
    ("changes", "outside", "expected"),
    [
        ({"waits": [LEARNER_WAITS, wait_of("generation", 7)]}, 0, [("engines", "learner")]),
        ({"waits": [LEARNER_WAITS, wait_of("grade", 30)]}, 0, [("graders", "learner")]),
        ({"waits": [LEARNER_WAITS]}, 8, [("environments", "learner")]),
        ({"waits": [LEARNER_WAITS], "engines": []}, 0, [("admission", "learner")]),
        ({"waits": [wait_of("commit", owner="learner")]}, 0, [("disk", "learner")]),
        ({"waits": [wait_of("load", owner="learner")]}, 0, [("engines", "learner")]),
        ({"waits": [wait_of("step", owner="learner")]}, 0, []),
        ({"groups_alive": 8, "engines": [STATE["engines"][0] | {"running": 0}]}, 0, [("learner", "engines")]),
        ({"groups_alive": 7, "engines": [STATE["engines"][0] | {"running": 0}]}, 0, []),
        ({"groups_alive": 8}, 0, []),
        ({"queue": 3}, 0, [("engines", "queue")]),
        ({"queue": 3, "waits": [LEARNER_WAITS]}, 0, [("engines", "learner"), ("engines", "queue")]),
    ],
)
def test_who_holds_up_whom_follows_from_waits_and_loads(run, changes, outside, expected):
    found = find_hold_ups(state_of(run, **changes), outside)
    assert [(each.holder, each.waiter) for each in found] == expected


def test_reason_of_a_queue_names_what_the_engines_lack(run):
    def explain(*engines):
        state = replace(state_of(run, queue=1), engines=list(engines))
        return find_hold_ups(state, 0)[-1].why

    full = Engine(name="a", running=8, capacity=8, version=6, behind=0, state="ready")
    assert explain(full) == "their slots are taken"
    assert explain(full, replace(full, behind=1)) == "1 of 2 have yet to load version 6"
    assert explain(replace(full, state="asleep")) == "the learner has their devices"


def test_wait_graph_leaves_health_checks_out(run):
    lines = list_waits(state_of(run), 3)
    assert [(line.waiter, line.awaited, line.count) for line in lines] == [
        ("learner", "the learner", 1),
        ("attempts", "engines", 7),
        ("attempts", "environments", 3),
    ]
    assert lines[1].share == pytest.approx(4 / 300)


# --- files that are not what they should be ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps(STATE | {"engines": [1]}).encode(),
        json.dumps(STATE | {"version": None}).encode(),
        json.dumps(STATE | {"second": float("nan")}).encode(),
        json.dumps(STATE | {"capacity": 1e400}).encode(),
        json.dumps(STATE | {"groups": [[1, 2]]}).encode(),
        json.dumps(STATE | {"history": {"a": 1}}).encode(),
        b" " * (2 << 20),
    ],
)
def test_damaged_state_is_none(site, run, content):
    (run / "live.json").write_bytes(content)
    with held(run):
        assert query(site)["pulse"] == "starting"
        assert site.get("/now/now").status_code == 200


def test_state_is_not_read_through_a_link(site, run, tmp_path):
    (tmp_path / "elsewhere.json").write_text(json.dumps(STATE))
    (run / "live.json").symlink_to(tmp_path / "elsewhere.json")
    assert query(site)["state"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"capacity": 10**15, "groups_per_step": 10**15, "max_age": 10**15, "group_size": 0},
        {"capacity": -5, "groups_per_step": 0, "groups": [], "groups_alive": 10**9},
        {"engines": [STATE["engines"][0] | {"running": 10**12, "capacity": 0}] * 5_000, "queue": 10**12},
        {"engines": [], "waits": [], "history": []},
        {"history": [[5.0, 10, 1, 1, "step"]] * 400},
        {"history": [[9.0, 10, 1, 1, "step"], [5.0, 3, 1, 1, "x"]], "interval": 1e300},
        {"groups": [[number, 10**9, "odd", 7] for number in range(5_000)]},
    ],
)
def test_absurd_numbers_are_drawn_within_bounds(site, run, changes):
    write_state(run, **changes)
    with held(run):
        answer = site.get("/now/now")
    assert answer.status_code == 200
    assert len(answer.content) < 2_000_000
    assert not re.search(r'"-?(nan|inf)"', answer.text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_are_only_text(site, run, text):
    engine = STATE["engines"][0] | {"name": text, "state": text}
    waits = [wait_of(text[:30]) | {"owner": text, "on": text}, wait_of(text, owner="learner")]
    write_state(run, engines=[engine], waits=waits, groups=[[1, 0, text, 1]])
    with held(run):
        answer = site.get("/now/now")
    assert answer.status_code == 200
    found = Inspector()
    found.feed(answer.text)
    drawing = {"element g", "element path", "element line", "element circle", "element defs", "element marker"}
    drawing |= {"element tspan"}
    assert set(found.problems) <= drawing


def test_page_of_a_run_that_is_about_to_begin_waits_for_it(site):
    answer = site.get("/now/nothing")
    assert answer.status_code == 404 and "data-retry" in answer.text
    assert "data-retry" not in site.get("/run/nothing").text


def test_stream_watches_the_state():
    assert "live.json" in WATCHED
