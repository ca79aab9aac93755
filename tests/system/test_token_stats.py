"""`record.token_stats`: numbers of each token that a step trained on, against the checkpoints of the run themselves."""

import json
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pandas
import pytest
import torch
from transformers import AutoModelForCausalLM

from antiphon.inspect.audit import audit
from tests.conftest import Project
from tests.unit.dashboard.sites import open_dashboard

pytestmark = pytest.mark.system

STATS = ["advantage", "entropy", "log_ratio"]
SAME = {"rollout": {"deterministic": True, "async_ratio": 1}, "checkpoint": {"every": 1, "keep_every": 1}}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, model):
    """A run with all numbers, and one that is equal but for them."""
    project = Project(tmp_path_factory.mktemp("recorded"), model)
    for name, stats in (("run", STATS), ("plain", [])):
        config = project.config(name=name, record={"token_stats": stats}, **SAME)
        assert (done := project.run("train", config)).returncode == 0, done.stderr
    return project


def read_samples(run, lineage, step):
    """Return the recorded segments of a step, each with its numbers."""
    stats = pandas.read_parquet(run / "token_stats" / f"{lineage}-{step:06d}.parquet")
    rollouts = pandas.concat([pandas.read_parquet(path) for path in sorted((run / "rollouts").glob("*.parquet"))])
    keys = ["lineage", "grp", "sibling", "try", "segment"]
    return stats.merge(rollouts, on=keys, how="left", validate="one_to_one")


def ask_model(directory, tokens):
    """Return log-prob and entropy of each token but the first, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor(np.array(tokens))[None].long()).logits[0, :-1].log_softmax(-1)
    chosen = found.gather(1, torch.tensor(np.array(tokens[1:])).long()[:, None])[:, 0]
    return chosen.numpy(), -(found.exp() * found).sum(-1).numpy()


def test_numbers_are_those_of_the_policy_before_the_step(recorded):
    run = recorded.folder / "runs" / "run"
    samples = read_samples(run, 0, 3)
    assert len(samples) == 8 and len(set(zip(samples.grp, samples.sibling, strict=True))) == 8
    before, scores = run / "checkpoints" / "step_000002", samples.groupby("grp").score.mean()
    for row in samples.itertuples():
        sampled = np.array(row.loss_mask)
        for stat in STATS:
            values = np.array(getattr(row, stat))
            assert values.dtype == np.float16
            assert np.isfinite(values).tolist() == sampled.tolist()
        logprobs, entropies = ask_model(before, row.tokens)
        mask = sampled[1:]
        np.testing.assert_allclose(np.array(row.entropy)[1:][mask], entropies[mask], rtol=2e-3)
        ratio = logprobs[mask] - np.array(row.logprobs)[1:][mask]
        np.testing.assert_allclose(np.array(row.log_ratio)[1:][mask], ratio, rtol=2e-3, atol=1e-5)
        # GRPO: one sign a sample, that of its score within the group.
        assert set(np.sign(np.array(row.advantage)[sampled])) == {np.sign(row.score - scores[row.grp])}


def test_recording_changes_nothing_that_is_learned(recorded):
    def weights(name):
        with closing(sqlite3.connect(recorded.folder / "runs" / name / "ledger.db")) as db:
            steps = db.execute("SELECT step, batch, version FROM steps ORDER BY step").fetchall()
            return steps, db.execute("SELECT version, digest FROM versions ORDER BY version").fetchall()

    assert weights("run") == weights("plain")
    assert not (recorded.folder / "runs" / "plain" / "token_stats").exists()


def test_undone_step_keeps_its_own_numbers(recorded, tmp_path):
    run = tmp_path / "runs" / "run"
    shutil.copytree(recorded.folder / "runs" / "run", run)
    shutil.rmtree(run / "checkpoints" / "step_000003")
    config = recorded.config(steps=4, record={"directory": str(tmp_path / "runs"), "token_stats": ["entropy"]}, **SAME)
    assert (done := recorded.run("train", config, "--resume")).returncode == 0, done.stderr
    assert sorted(path.name for path in (run / "token_stats").iterdir()) == [
        *(f"0-{step:06d}.parquet" for step in (1, 2, 3)),
        *(f"1-{step:06d}.parquet" for step in (3, 4)),
    ]
    assert audit(run).violations == []
    with open_dashboard(tmp_path / "runs", tmp_path / "cache") as client:
        for lineage, undone in ((0, True), (1, False)):
            with closing(sqlite3.connect(run / "ledger.db")) as db:
                query = "SELECT grp, sibling, try FROM attempts WHERE lineage = ? AND step = 3"
                grp, sibling, number = db.execute(query, (lineage,)).fetchone()
            name = f"{lineage}:{grp}.{sibling}.{number}"
            page = client.get(f"/api/attempt/run?id={name}&color=entropy").json()
            assert page["stats"].startswith("Of step 3, which a resume has undone: " if undone else "Of step 3: ")
            assert ("advantage" in page["colorings"]) == undone  # the resume asks for entropy alone
            assert ("advantage" in page["stats"].partition("Not on record:")[2]) != undone


def test_audit_finds_numbers_that_are_of_nobody(recorded, tmp_path):
    run = shutil.copytree(recorded.folder / "runs" / "run", tmp_path / "run")
    files = run / "token_stats"
    assert audit(run).violations == []
    (files / "0-000002.parquet").unlink()  # not all steps must have them
    assert audit(run).violations == []
    shutil.copy(files / "0-000003.parquet", files / "0-000002.parquet")
    (files / "0-000001.parquet").write_bytes((files / "0-000001.parquet").read_bytes()[:-9])
    with closing(sqlite3.connect(run / "ledger.db")) as db, db:
        db.execute("UPDATE attempts SET step = 1 WHERE step = 3 AND sibling = 0")
    found = [violation for violation in audit(run).violations if violation.startswith("token_stats/")]
    assert [violation.split()[0][-9:-8] + violation.split()[1] for violation in found] == ["1cannot", "2has", "3has"]
    assert "3 did not train on" in found[2] and "has 2 attempts" in found[2]


def test_page_says_how_to_have_what_is_absent(recorded, tmp_path):
    with open_dashboard(recorded.folder / "runs", tmp_path / "cache") as client:
        page = client.get("/attempt/plain?id=0:0.0.0").text
        colored = client.get("/attempt/run?id=0:0.0.0&color=advantage").text
    assert (
        "Not on record: entropy, advantage, log_ratio, waad, fai; record.token_stats lists what a run writes." in page
    )
    assert 'value="advantage" selected' in colored and ("t s9" in colored or "t s0" in colored)
    assert "t l" not in colored.partition('class="conversation"')[2]


def test_unknown_names_and_absent_rhythm_are_refused(recorded):
    for stats, said in ((["entropi"], "entropy"), (["fai"], "algorithm.rhythm")):
        config = recorded.config(name="refused", record={"token_stats": stats})
        done = recorded.run("train", config)
        assert done.returncode == 2 and "record.token_stats" in done.stderr and said in done.stderr
    assert json.loads((recorded.folder / "runs" / "run" / "summary.json").read_text())["steps"] == 3
