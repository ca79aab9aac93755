"""Checkpoints: whole or passed over, whatever was torn."""

import json
from contextlib import closing

import pytest

from antiphon.core import failpoints
from antiphon.core.errors import RecordError
from antiphon.inspect.export import export
from antiphon.record import checkpoint
from antiphon.record.checkpoint import (
    MANIFEST,
    STATE,
    NoCheckpointError,
    check_model,
    checkpoint_name,
    convert_save_errors,
    newest_checkpoint,
    prune_checkpoints,
    publish_checkpoint,
    set_aside_newer,
    staging_dir,
    verify_checkpoint,
)
from antiphon.record.resume import open_next_lineage
from antiphon.record.store import LedgerStore
from tests.raising import raises_with

FILES = {
    "model.safetensors": b"weights" * 100,
    "tokenizer.json": b"{}",
    "training_state/0.pt": b"moments" * 50,
    "critics/0/model.safetensors": b"values" * 9,
}


def make(checkpoints, step):
    checkpoints.mkdir(exist_ok=True)
    place = staging_dir(checkpoints / checkpoint_name(step))
    for name, content in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    publish_checkpoint(place, checkpoints / checkpoint_name(step), {"step": step})
    return checkpoints / checkpoint_name(step)


def missing(file):
    file.unlink()


def truncated(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def one_bit_flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(bytes(content))


def test_what_one_rank_wrote_elsewhere_is_missed(tmp_path):
    place = staging_dir(tmp_path / checkpoint_name(1))
    (place / "critics").mkdir()
    for rank in (1, 2):
        (place / f"critics/model-{rank}.safetensors").write_bytes(b"weights")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-3.safetensors", "c": "model-2.safetensors"}}
    (place / "critics/model.safetensors.index.json").write_text(json.dumps(index))
    with raises_with(RecordError, path=place / "critics/model-3.safetensors"):
        publish_checkpoint(place, tmp_path / checkpoint_name(1), {})
    assert not (tmp_path / checkpoint_name(1)).exists()


@pytest.mark.parametrize("name", [*FILES, STATE, MANIFEST])
@pytest.mark.parametrize("tear", [missing, truncated, one_bit_flipped])
def test_a_torn_checkpoint_is_passed_over_and_named(tmp_path, name, tear):
    before, last = make(tmp_path / "checkpoints", 3), make(tmp_path / "checkpoints", 6)
    tear(last / name)
    told = []
    assert newest_checkpoint(tmp_path / "checkpoints", told.append) == before
    assert len(told) == 1 and f"{last.name}/{name}" in told[0]


def test_a_checkpoint_that_cannot_be_opened_is_passed_over(tmp_path, monkeypatch):
    before, last = make(tmp_path / "checkpoints", 3), make(tmp_path / "checkpoints", 6)

    def fail_at_last(directory):
        if directory == last:
            raise PermissionError(13, "Permission denied", str(last / STATE))

    monkeypatch.setattr(checkpoint, "verify_checkpoint", fail_at_last)
    told = []
    assert newest_checkpoint(tmp_path / "checkpoints", told.append) == before
    assert len(told) == 1 and f"{last.name}/{STATE}" in told[0]


def test_without_one_that_is_whole_nothing_begins_again(tmp_path):
    missing(make(tmp_path / "checkpoints", 3) / STATE)
    with pytest.raises(NoCheckpointError):
        newest_checkpoint(tmp_path / "checkpoints", lambda text: None)


def test_every_bit_of_the_manifest_counts(tmp_path):
    directory = make(tmp_path / "checkpoints", 1)
    whole = (directory / MANIFEST).read_bytes()
    for position in range(0, len(whole), 7):
        torn = bytearray(whole)
        torn[position] ^= 1
        (directory / MANIFEST).write_bytes(torn)
        if json.loads(whole) == _loaded(bytes(torn)):  # white space is nobody's content
            continue
        with pytest.raises(RecordError):
            verify_checkpoint(directory)


def _loaded(content):
    try:
        return json.loads(content)
    except ValueError:
        return None


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    directory = make(tmp_path / "checkpoints", 2)
    place = staging_dir(tmp_path / "checkpoints" / checkpoint_name(3))
    with raises_with(RecordError, match="no space", path=place), convert_save_errors(place):
        (place / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")
    verify_checkpoint(directory)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [checkpoint_name(2)]


def test_a_checkpoint_in_the_place_of_another_is_refused(tmp_path):
    make(tmp_path / "checkpoints", 2)
    with raises_with(RecordError, path=tmp_path / "checkpoints" / f"{checkpoint_name(2)}.partial"):
        make(tmp_path / "checkpoints", 2)


def test_pruning_keeps_the_last_and_every_so_many(tmp_path):
    for step in range(0, 50, 5):
        make(tmp_path / "checkpoints", step)
    staging_dir(tmp_path / "checkpoints" / checkpoint_name(99))
    prune_checkpoints(tmp_path / "checkpoints", keep_last=2, keep_every=20)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == list(
        map(checkpoint_name, (0, 20, 40, 45))
    )


def test_a_crash_while_pruning_leaves_nothing_half_removed(tmp_path):
    class Crash(Exception):
        pass

    def look(point, path):
        if point == "checkpoint.prune":
            raise Crash

    for step in range(4):
        make(tmp_path / "checkpoints", step)
    failpoints.watch(look)
    try:
        with pytest.raises(Crash):
            prune_checkpoints(tmp_path / "checkpoints", keep_last=1, keep_every=0)
    finally:
        failpoints.watch(None)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_??????")] == [checkpoint_name(3)]
    prune_checkpoints(tmp_path / "checkpoints", keep_last=1, keep_every=0)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [checkpoint_name(3)]


def test_an_export_is_the_model_alone(tmp_path):
    make(tmp_path / "checkpoints", 1)
    export(tmp_path / "checkpoints", tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"model.safetensors", "tokenizer.json"}
    with raises_with(RecordError, path=tmp_path / "model"):
        export(tmp_path / "checkpoints", tmp_path / "model")


def test_newer_checkpoints_are_set_aside_once(tmp_path):
    places = [make(tmp_path / "checkpoints", step) for step in (1, 2, 3)]
    (tmp_path / "checkpoints" / f"{checkpoint_name(3)}.torn").mkdir()
    set_aside_newer(places[1])
    found = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert found == {checkpoint_name(1), checkpoint_name(2), f"{checkpoint_name(3)}.torn"}
    verify_checkpoint(tmp_path / "checkpoints" / f"{checkpoint_name(3)}.torn")


def test_a_model_directory_is_confined_if_it_is_a_checkpoint(tmp_path):
    check_model(tmp_path / "none")
    outside = tmp_path / "outside"
    outside.touch()
    checkpoint = make(tmp_path / "checkpoints", 1)
    check_model(checkpoint)
    for model in (tmp_path / "model", checkpoint):
        model.mkdir(exist_ok=True)
        (model / "config.json").symlink_to(outside)
    check_model(tmp_path / "model")  # as caches of downloads are
    with raises_with(RecordError, path=checkpoint / "config.json"):
        check_model(checkpoint)


def test_a_checkpoint_of_fine_tuning_alone_is_not_resumed(tmp_path):
    place = make(tmp_path / "checkpoints", 3)  # its state has no scheduler
    with closing(LedgerStore(tmp_path)) as store, raises_with(RecordError, path=place, match="fine-tuning"):
        open_next_lineage(store, tmp_path / "checkpoints", 1, print)
