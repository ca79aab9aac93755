"""The index has what the ledger has, follows a run that goes on, and may be lost at any time."""

import sqlite3
from contextlib import closing

import pytest

from antiphon.core.errors import RecordError
from antiphon.dashboard.index.copy_ledger import copy_attempts
from antiphon.dashboard.index.read_events import copy_spans
from antiphon.dashboard.index.read_texts import index_texts
from antiphon.dashboard.index.store import identify, index_path, open_index
from antiphon.dashboard.index.worker import IndexWorker
from antiphon.inspect.token_texts import TokenTexts
from antiphon.record.safe_ledger import open_ledger
from antiphon.record.timeline import Timeline
from tests.unit.dashboard.sites import copy_run, make_run, open_dashboard, wait_until_indexed

ROWS = "SELECT lineage, grp, sibling, try, status, step, score, tokens, file FROM {} ORDER BY 1, 2, 3, 4"


def rows_of(database, table="attempts"):
    return database.execute(ROWS.format(table)).fetchall()


@pytest.fixture
def run(tmp_path, runs):
    return copy_run(runs / "simulated", tmp_path, "run")


@pytest.fixture
def index(tmp_path, run):
    with closing(open_index(tmp_path / "index.db", identify(run))) as db:
        yield db


def test_all_attempts_are_copied(run, index):
    copy_attempts(index, run)
    with closing(sqlite3.connect(run / "ledger.db")) as ledger:
        assert rows_of(index) == rows_of(ledger)
        ages = ledger.execute(
            "SELECT s.version - 1 - a.started FROM attempts a JOIN steps s USING (lineage, step) WHERE status = 'trained'"
            " ORDER BY lineage, grp, sibling, try"
        ).fetchall()
    query = "SELECT age FROM attempts WHERE status = 'trained' ORDER BY lineage, grp, sibling, try"
    assert index.execute(query).fetchall() == ages


def test_only_what_may_have_changed_is_copied_again(run, index, monkeypatch):
    monkeypatch.setattr("antiphon.dashboard.index.copy_ledger.GROUPS", 3)
    with closing(sqlite3.connect(run / "ledger.db")) as ledger:
        (half,) = ledger.execute("SELECT max(grp) / 2 FROM groups").fetchone()
        ledger.executescript(
            f"CREATE TEMP TABLE ends AS SELECT * FROM attempts WHERE grp > {half};"
            f" CREATE TEMP TABLE outcomes AS SELECT grp, outcome FROM groups WHERE grp > {half};"
            f" UPDATE attempts SET status = 'running', step = NULL WHERE grp = {half};"
            f" UPDATE groups SET outcome = NULL WHERE grp = {half};"
            f" DELETE FROM attempts WHERE grp > {half}; DELETE FROM groups WHERE grp > {half};"
        )
        copy_attempts(index, run)
        assert rows_of(index) == rows_of(ledger)
        first = {row[:4]: row for row in index.execute("SELECT lineage, grp, sibling, try, row FROM attempts")}
        ledger.executescript(
            f"UPDATE attempts SET status = 'lost' WHERE grp = {half};"
            f" UPDATE groups SET outcome = 'lost' WHERE grp = {half};"
            " INSERT INTO groups SELECT 0, grp, 1, 0, outcome, NULL FROM outcomes; INSERT INTO attempts SELECT * FROM ends;"
        )
        copied = copy_attempts(index, run)
        assert rows_of(index) == rows_of(ledger)
        (groups,) = ledger.execute("SELECT max(grp) FROM groups").fetchone()
    assert copied == groups - half + 1  # from the group that had not ended
    again = {row[:4]: row for row in index.execute("SELECT lineage, grp, sibling, try, row FROM attempts")}
    assert {key: again[key] for key in first} == first  # rows keep their numbers, which texts refer to
    assert copy_attempts(index, run) == 0


def test_another_run_in_the_same_place_replaces_the_index(tmp_path, run):
    path = tmp_path / "cache" / "index.db"
    with closing(open_index(path, identify(run))) as db:
        copy_attempts(db, run)
        assert rows_of(db)
    with closing(open_index(path, identify(run))) as db:
        assert rows_of(db)
    with closing(open_index(path, identify(run) + "another")) as db:
        assert rows_of(db) == []


def test_torn_index_is_built_again(tmp_path, run):
    path = tmp_path / "index.db"
    path.write_bytes(b"no database at all" * 100)
    with closing(open_index(path, identify(run))) as db:
        copy_attempts(db, run)
        assert rows_of(db)


def test_texts_are_found_by_words_and_phrases(run, index):
    texts = TokenTexts.open(run)
    copy_attempts(index, run)
    files = index_texts(index, run, texts)
    assert files == len(list((run / "rollouts").glob("*.parquet")))
    assert index_texts(index, run, texts) == 0  # each file once
    (previews,) = index.execute("SELECT count(*) FROM previews").fetchone()
    (recorded,) = index.execute("SELECT count(*) FROM attempts WHERE file IS NOT NULL AND origin IS NULL").fetchone()
    assert previews == recorded
    found = index.execute("SELECT count(*) FROM texts WHERE texts MATCH 'two'").fetchone()
    assert 0 < found[0] <= recorded


def test_index_of_texts_stops_at_its_size(run, index, monkeypatch):
    monkeypatch.setattr("antiphon.dashboard.index.read_texts.MOST_BYTES", 1)
    copy_attempts(index, run)
    assert index_texts(index, run, TokenTexts.open(run)) == 0


def test_spans_are_those_of_the_timeline(run, index):
    copy_spans(index, run)
    with (run / "events.jsonl").open() as lines:
        timeline = Timeline.read(lines)
    steps = index.execute("SELECT start, stop FROM spans WHERE kind = 'step' ORDER BY number").fetchall()
    assert steps == timeline.steps
    requests = index.execute("SELECT label, start, stop FROM spans WHERE kind = 'request' ORDER BY number").fetchall()
    assert requests == [(each.request, each.placed, each.served) for each in timeline.served]
    assert copy_spans(index, run) == 0


def test_spans_of_a_growing_file_are_those_of_the_whole(run, index, tmp_path):
    whole = (run / "events.jsonl").read_bytes()
    for size in range(0, len(whole) + 1, len(whole) // 7):
        (run / "events.jsonl").write_bytes(whole[:size])  # a part may end within a line
        copy_spans(index, run)
    (run / "events.jsonl").write_bytes(whole)
    copy_spans(index, run)
    found = index.execute("SELECT lane, kind, label, start, stop FROM spans ORDER BY number").fetchall()
    with closing(open_index(tmp_path / "other.db", "x")) as other:
        copy_spans(other, run)
        assert other.execute("SELECT lane, kind, label, start, stop FROM spans ORDER BY number").fetchall() == found


def test_lost_cache_is_built_again(tmp_path, runs):
    cache = tmp_path / "cache"
    with open_dashboard(runs, cache) as client:
        before = wait_until_indexed(client, "simulated")
    for path in cache.iterdir():
        path.unlink()
    with open_dashboard(runs, cache) as client:
        assert wait_until_indexed(client, "simulated") == before


def test_page_answers_while_the_index_is_built(tmp_path, runs):
    with open_dashboard(runs, tmp_path) as client:
        assert client.get("/rollouts/simulated").status_code == 200


@pytest.mark.parametrize("damage", ["", "garbage" * 1000])
def test_damaged_ledger_is_named(tmp_path, runs, damage):
    run = copy_run(runs / "simulated", tmp_path / "runs", "broken")
    (run / "ledger.db").write_text(damage)
    with open_dashboard(tmp_path / "runs", tmp_path / "cache") as client:
        answer = client.get("/api/rollouts/broken")
        assert answer.status_code == 422
        assert "ledger.db" in answer.json()["error"]
        assert client.get("/runs").status_code == 200


def test_ledger_with_a_view_is_not_queried(tmp_path, runs):
    run = copy_run(runs / "simulated", tmp_path / "runs", "tricked")
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        db.executescript("ALTER TABLE attempts RENAME TO kept; CREATE VIEW attempts AS SELECT * FROM kept")
    with open_dashboard(tmp_path / "runs", tmp_path / "cache") as client:
        assert client.get("/api/rollouts/tricked").status_code == 422


def test_run_without_a_tokenizer_says_so(tmp_path):
    make_run(tmp_path / "runs", "mute")
    (tmp_path / "runs" / "mute" / "model" / "tokenizer.json").unlink()
    with open_dashboard(tmp_path / "runs", tmp_path / "cache") as client:
        page = wait_until_indexed(client, "mute")
        assert "tokenizer" in page["problem"]
        attempt = client.get("/api/rollouts/mute?status=trained").json()["rows"][0]["id"]
        shown = client.get("/api/attempt/mute", params={"id": attempt}).json()
    assert "numbers" in shown["problem"] and shown["parts"]


def test_index_is_private(tmp_path, runs):
    worker = IndexWorker(tmp_path / "cache")
    with pytest.raises(RecordError):
        worker.open(runs / "simulated")  # nobody asked for it
    with open_dashboard(runs, tmp_path / "cache") as client:
        wait_until_indexed(client, "simulated")
    path = index_path(runs / "simulated", tmp_path / "cache")
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_reading_a_ledger_leaves_no_file_beside_it(tmp_path, runs):
    run = copy_run(runs / "simulated", tmp_path / "runs", "run")
    for path in run.glob("ledger.db-*"):
        path.unlink()
    open_ledger(run).close()
    with open_dashboard(tmp_path / "runs", tmp_path / "cache") as client:
        wait_until_indexed(client, "run")
        client.get("/api/timeline/run")
    assert list(run.glob("ledger.db-*")) == []
