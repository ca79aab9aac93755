"""Two runs: the first thing in which they differ, whatever it is."""

import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from antiphon.core.errors import RecordError
from antiphon.core.types import AttemptId
from antiphon.inspect.diff import diff
from antiphon.inspect.why import why
from antiphon.record import trajectories
from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import ScenarioConfig
from tests.raising import raises_with

SCENARIO = {
    "steps": 4,
    "rollout": {"groups_per_step": 2, "group_size": 2, "async_ratio": 1, "sampling": {"max_tokens": 50}},
    "response_tokens": {"mean": 20},
}


def played(root, **changes):
    simulate(ScenarioConfig.model_validate(SCENARIO | changes), keep=root)
    return root / "scenario"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return played(tmp_path_factory.mktemp("one"))


def test_equal_runs_do_not_differ(run, tmp_path):
    assert diff(run, played(tmp_path)) is None


def test_a_configuration_differs_before_what_follows_from_it(run, tmp_path):
    found = diff(run, played(tmp_path, seed=1))
    assert found.startswith("configuration: ") and "seed: 1" in found


CHANGES = {
    "UPDATE lineages SET code = 'other'": "code: ",
    "UPDATE prompts SET id = 'another' WHERE prompt = (SELECT prompt FROM groups WHERE step = 2 LIMIT 1)": "step 2: data",
    "UPDATE attempts SET digest = digest + 1 WHERE step = 3": "step 3: ",
    "UPDATE attempts SET score = 0.5 WHERE step = 3": "score",
    "UPDATE attempts SET started = 0 WHERE step = 3": "the version it started at",
    "UPDATE steps SET batch = 'x' WHERE step = 2": "batch",
    "DELETE FROM attempts WHERE step = 4": "has no more",
    "UPDATE versions SET digest = 7 WHERE version = 3": "version 3: its weights",
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_difference_is_named(run, tmp_path, change):
    other = shutil.copytree(run, tmp_path / "other")
    with closing(sqlite3.connect(other / "ledger.db")) as db:
        db.executescript(change)
    assert CHANGES[change] in diff(run, other)


def test_every_attempt_can_be_asked_for(run):
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        attempts = db.execute("SELECT lineage, grp, sibling, try, status FROM attempts").fetchall()
    for lineage, *identity, status in attempts:
        told = dict(why(run, f"{lineage}:{'.'.join(map(str, identity))}"))
        assert told["status"].startswith(status)


def trained(run):
    """An attempt that was trained on, with its row and its only segment."""
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        db.row_factory = sqlite3.Row
        row = db.execute("SELECT * FROM attempts WHERE step = 2 ORDER BY sibling LIMIT 1").fetchone()
        step = db.execute("SELECT * FROM steps WHERE step = 2").fetchone()
    identity = AttemptId(row["grp"], row["sibling"], row["try"])
    (segment,) = trajectories.read(run / "rollouts" / row["file"])[identity].segments
    return ".".join(map(str, identity)), row, step, segment


def test_a_trained_attempt_tells_where_it_came_from(run):
    name, row, step, segment = trained(run)
    told = dict(why(run, name))
    assert told["attempt"] == f"0:{name}" and told["started at version"] == str(row["started"])
    age = step["version"] - 1 - row["started"]
    assert told["status"] == f"trained at step 2, at age {age}; the step published version {step['version']}"
    assert told["score"] == f"scored {row['score']:g}"
    (turn,) = segment.turns
    said = told["segment 0, turn 0"]
    assert f"tokens {turn.start}–{turn.stop} ({turn.stop - turn.start} sampled by" in said
    counts = Counter(segment.versions[turn.start : turn.stop].tolist())
    assert all(f"version {version}: {count}" in said for version, count in counts.items())


def test_a_token_tells_who_sampled_it(run):
    name, _, _, segment = trained(run)
    given, last = 1, len(segment.tokens) - 1
    assert not segment.loss_mask[given] and segment.loss_mask[last]
    assert (
        dict(why(run, f"{name}@{given}"))[f"token {given}"]
        == f"{segment.tokens[given]}, part of the input, not sampled"
    )
    told = dict(why(run, f"{name}@{last}"))[f"token {last}"]
    version, logprob = segment.versions[last], segment.logprobs[last]
    assert told == f"{segment.tokens[last]}, sampled in turn 0 by version {version}, log-prob {logprob:.6f}"
    for beyond in (last + 1, -1):
        with raises_with(RecordError, match=f"token {beyond}") as caught:
            list(why(run, f"{name}@{beyond}"))
        assert Path(caught.value.path).parent == run / "rollouts"


def test_a_run_with_a_tokenizer_tells_what_was_said(run, tmp_path):
    name, _, _, segment = trained(run)
    other = shutil.copytree(run, tmp_path / "other")
    (other / "model").mkdir()
    words = {f"w{token}": token for token in range(int(segment.tokens.max()) + 1)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(other / "model" / "tokenizer.json"))
    (turn,) = segment.turns
    told, without = dict(why(other, name)), dict(why(run, name))
    assert told == without | {
        "segment 0: prompt": " ".join(f"w{token}" for token in segment.tokens[: turn.start]),
        "segment 0, turn 0: response": " ".join(f"w{token}" for token in segment.tokens[turn.start :]),
    }
    last = segment.tokens[-1]
    assert dict(why(other, f"{name}@{len(segment.tokens) - 1}"))[f"token {len(segment.tokens) - 1}"].startswith(
        f"{last} ' w{last}', sampled in turn 0"
    )


@pytest.mark.parametrize("name", ["1.2", "a.b.c", "0.0.0@x", "", "99999.0.0", "7:0.0.0"])
def test_what_names_no_attempt_is_an_error(run, name):
    with pytest.raises(RecordError):
        list(why(run, name))


def test_an_undone_step_a_failure_and_an_origin_are_told(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    name, row, *_ = trained(other)
    with closing(sqlite3.connect(other / "ledger.db")) as db:
        db.executescript(
            f"UPDATE steps SET undone = 1; UPDATE attempts SET origin = '0:{name}', failure = 'reward: lost' WHERE"
            f" grp = {row['grp']} AND sibling = {row['sibling']} AND try = {row['try']}"
        )
    told = dict(why(other, name))
    assert "undid" in told["status"] and told["failure"] == "reward: lost"
    assert told["reused from"].startswith(f"0:{name}")
