"""Directories that both ends of a channel see: whose go when, and what stays."""

import fcntl
import multiprocessing
import os
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import antiphon.weights.shared_directory as shared_memory
from antiphon.cli.app import app
from antiphon.core.errors import ConfigError
from antiphon.weights.checkpoint_files import list_weight_files
from antiphon.weights.shared_directory import LOCK, SHARED_MEMORY, remove_abandoned_directories, shared_directory
from tests.raising import raises_with


def test_a_directory_lives_as_long_as_its_block(tmp_path):
    with shared_directory("run", str(tmp_path)) as path:
        assert path.parent == tmp_path and path.name.startswith("antiphon-run-")
        (path / "weights").write_bytes(b"1")
        assert remove_abandoned_directories(str(tmp_path)) == [] and path.is_dir(), "it is in use"
        with shared_directory("run", str(tmp_path)) as other:
            assert other != path and path.is_dir()
        assert path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_goes_when_its_block_raises(tmp_path):
    with pytest.raises(KeyError), shared_directory("run", str(tmp_path)):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def _die_inside(parent):
    with shared_directory("killed", parent) as path:
        (path / "exchange").mkdir()
        (path / "exchange" / "weights").write_bytes(b"1")
        os._exit(9)


def test_what_a_killed_process_left_goes_with_the_next(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_die_inside, args=(str(tmp_path),))
    process.start()
    process.join()
    (left,) = tmp_path.iterdir()
    (tmp_path / "antiphon-without-a-lock").mkdir()
    (tmp_path / "another").mkdir()
    with shared_directory("run", str(tmp_path)) as path:
        assert not left.exists()
        assert {path.name, "antiphon-without-a-lock", "another"} == {each.name for each in tmp_path.iterdir()}


def test_abandoned_directories_are_told(tmp_path):
    for name in ("antiphon-a-1", "antiphon-b-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK).touch()
    (tmp_path / "antiphon-a-1" / "link").symlink_to(tmp_path)
    with (tmp_path / "antiphon-b-2" / LOCK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert remove_abandoned_directories(str(tmp_path)) == [tmp_path / "antiphon-a-1"]
    assert remove_abandoned_directories(str(tmp_path)) == [tmp_path / "antiphon-b-2"]
    assert remove_abandoned_directories(str(tmp_path)) == []


def test_doctor_names_what_it_removes(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)  # in the real one, runs beside may come first
    (tmp_path / "antiphon-killed-1").mkdir()
    (tmp_path / "antiphon-killed-1" / LOCK).touch()
    done = CliRunner().invoke(app, ["doctor", "--clean"])
    assert done.output.startswith(f"removed:\n{tmp_path}/antiphon-killed-1\n") and not list(tmp_path.iterdir())


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "antiphon-run-1").mkdir()
    (tmp_path / "elsewhere").touch()
    (tmp_path / "antiphon-run-1" / LOCK).symlink_to(tmp_path / "elsewhere")
    assert remove_abandoned_directories(str(tmp_path)) == [] and (tmp_path / "elsewhere").exists()


def test_the_place_is_shared_memory_unless_another_is_named():
    expected = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    with shared_directory("run") as path:
        assert path.parent == expected


def test_missing_directory_is_a_config_error(tmp_path):
    gone = str(tmp_path / "gone")
    with raises_with(ConfigError, key="weights.directory", value=gone), shared_directory("run", gone):
        pass


def test_weights_of_a_model_directory(tmp_path):
    index, whole = tmp_path / "model.safetensors.index.json", tmp_path / "model.safetensors"
    assert list_weight_files(tmp_path) == []
    index.write_text('{"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}')
    assert list_weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    whole.touch()
    assert list_weight_files(tmp_path) == [whole], "transformers takes it, whatever lies beside it"
