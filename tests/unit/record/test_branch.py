"""Runs that begin at a checkpoint of another: what they take of it, and that it stays as it was."""

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from tempfile import TemporaryDirectory

import pytest

from antiphon.core.errors import ConfigError, RecordError
from antiphon.inspect.audit import audit
from antiphon.record import schema
from antiphon.record.branch import begin_branch, find_checkpoint
from antiphon.record.checkpoint import MANIFEST, publish_checkpoint, read_state, staging_dir, verify_checkpoint
from antiphon.record.reader import BranchPoint, RunReader
from antiphon.record.resume import open_next_lineage
from antiphon.record.run_dir import RunDirectory
from antiphon.record.store import LedgerStore
from antiphon.weights.shared_directory import SHARED_MEMORY
from tests.raising import raises_with

CONFIG = "rollout: {groups_per_step: 2, group_size: 4, async_ratio: 0, deterministic: false, sampler: null}\n"
STATE = {"lineage": 3, "mixture": {}, "scheduler": {"next_group": 9, "live": [], "deferred": []}, "controllers": None}


def publish(run, step, state=STATE, weights=b"weights"):
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    place = run / "checkpoints" / f"step_{step:06d}"
    staging = staging_dir(place)
    (staging / "training_state").mkdir()
    (staging / "model.safetensors").write_bytes(weights * (step + 1))
    (staging / "training_state" / "0.pt").write_bytes(b"moments" * (step + 1))
    publish_checkpoint(staging, place, {"step": step, "version": step + 5, **state})
    return place


@pytest.fixture
def source(tmp_path):
    run = tmp_path / "source"
    for step in (0, 4, 8):
        publish(run, step)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    return run


@pytest.fixture
def target(tmp_path):
    directory = RunDirectory.create(tmp_path, "new")
    directory.config.write_text(CONFIG)
    return directory


def contents(directory):
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_branch_has_files_and_names_their_origin(source, target):
    before = contents(source)
    begin_branch(*find_checkpoint(source, 4), target)
    assert contents(source) == before
    taken = source / "checkpoints" / "step_000004"
    digest = json.loads((taken / MANIFEST).read_text())["digest"]
    with RunReader.open(target.path) as reader:
        assert reader.find_branch_point() == BranchPoint(run=str(source), lineage=3, step=4, version=9, digest=digest)

    shutil.rmtree(source)
    place = target.checkpoints / "step_000004"
    verify_checkpoint(place)
    assert (place / "model.safetensors").read_bytes() == b"weights" * 5
    assert read_state(place) == {**STATE, "step": 4, "version": 9, "lineage": 0}
    assert (target.built_model / "config.json").read_text() == "{}"
    found = audit(target.path)
    assert found.violations == [] and found.branch_point["digest"] == digest and found.branch_point["step"] == "4"


def test_resume_goes_on_from_the_branch_point(source, target):
    begin_branch(*find_checkpoint(source, 4), target)
    with closing(LedgerStore(target.path)) as store:
        for lineage in (1, 2):  # the second: ended before it had a checkpoint of its own
            found = open_next_lineage(store, target.checkpoints, 0, print)
            assert (found.lineage, found.state["step"], found.state["version"]) == (lineage, 4, 9)
    assert audit(target.path).violations == []


@pytest.mark.parametrize("step", [3, 9, 400])
def test_step_without_checkpoint_lists_those_with_one(source, step):
    with raises_with(ConfigError, key="at", value=step, valid=("0", "4", "8")):
        find_checkpoint(source, step)


@pytest.mark.parametrize("name", ["model.safetensors", "training_state/0.pt", "state.json", MANIFEST])
def test_damaged_checkpoint_is_not_taken(source, target, name):
    file = source / "checkpoints" / "step_000004" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)
    with raises_with(ConfigError, key="at", value=4, valid=("0", "8")):
        begin_branch(*find_checkpoint(source, 4), target)
    assert list(target.checkpoints.glob("step_??????")) == []


def test_manifest_without_files_is_no_checkpoint(source):
    (source / "checkpoints" / "step_000004" / MANIFEST).write_text("{}")
    with raises_with(ConfigError, key="at", value=4, valid=("0", "8")):
        find_checkpoint(source, 4)


@pytest.mark.parametrize("what", ["removed", "replaced"])
def test_checkpoint_may_go_while_it_is_taken(source, target, what):
    """A run that is still going prunes its checkpoints, and after a rollback writes another one for the same step."""
    point, state = find_checkpoint(source, 4)
    shutil.rmtree(source / "checkpoints" / "step_000004")
    if what == "replaced":
        publish(source, 4, weights=b"others")
    with raises_with(ConfigError, key="at", value=4):
        begin_branch(point, state, target)
    assert list(target.checkpoints.glob("step_??????")) == []


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="this platform has no shared memory of this kind")
def test_another_file_system_gets_copies(source):
    with TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        target = RunDirectory.create(folder, "new")
        begin_branch(*find_checkpoint(source, 4), target)
        place = target.checkpoints / "step_000004"
        verify_checkpoint(place)
        taken = source / "checkpoints" / "step_000004"
        is_linked = taken.stat().st_dev == place.stat().st_dev
        assert (place / "model.safetensors").samefile(taken / "model.safetensors") == is_linked


def test_checkpoint_of_fine_tuning_alone_is_refused(source):
    place = publish(source, 7, state={})
    with raises_with(RecordError, path=place, match="fine-tuning"):
        find_checkpoint(source, 7)


def test_links_out_of_the_run_are_not_followed(source, target, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"weights" * 5)
    file = source / "checkpoints" / "step_000004" / "model.safetensors"
    file.unlink()
    file.symlink_to(secret)
    with raises_with(ConfigError, key="at", value=4, valid=("0", "8")):
        begin_branch(*find_checkpoint(source, 4), target)


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM events WHERE kind = 'branch'",
        "UPDATE lineages SET cut = 5",
        "UPDATE lineages SET version = 5",
        "INSERT INTO steps VALUES (0, 6, 10, NULL, 0.0, 0.0, 1, 2, 0)",
    ],
    ids=["nobody is named", "another step", "another version", "a step is missing"],
)
def test_audit_finds_a_wrong_begin(source, target, change):
    begin_branch(*find_checkpoint(source, 4), target)
    with closing(sqlite3.connect(target.path / "ledger.db")) as db:
        db.execute(change)
        db.commit()
    assert audit(target.path).violations


@pytest.mark.parametrize(("step", "found"), [(5, 0), (6, 1)])
def test_steps_follow_the_branch_point(source, target, step, found):
    begin_branch(*find_checkpoint(source, 4), target)
    with closing(LedgerStore(target.path)) as store:
        open_next_lineage(store, target.checkpoints, 0, print)
        with store.connection as db:
            db.execute("INSERT INTO steps VALUES (1, ?, NULL, NULL, 0.0, NULL, 1, NULL, 0)", (step,))
    assert len(audit(target.path).violations) == found


@pytest.mark.parametrize("detail", ["[]", "{}", '{"run": 1}', "not JSON", '{"step": {}}'])
def test_damaged_branch_point_is_one_error(source, target, detail):
    begin_branch(*find_checkpoint(source, 4), target)
    with closing(sqlite3.connect(target.path / "ledger.db")) as db:
        db.execute("UPDATE events SET detail = ? WHERE kind = 'branch'", (detail,))
        db.commit()
    for read in (audit, lambda path: RunReader.open(path).find_branch_point()):
        with pytest.raises(RecordError):
            read(target.path)


def test_schema_stays_that_of_other_runs(source, target):
    begin_branch(*find_checkpoint(source, 4), target)
    with closing(sqlite3.connect(target.path / "ledger.db")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)
