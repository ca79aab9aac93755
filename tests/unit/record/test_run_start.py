"""Starts of runs: a refused one leaves the directory as it was before."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.core.errors import ConfigError, RecordError, WorkerDiedError
from antiphon.record.run_dir import RunDirectory
from antiphon.record.run_start import RunStart
from antiphon.record.store import LedgerStore
from tests.raising import raises_with

ROOT = Path(__file__).parents[3]


def contents(path):
    """Return every file and link below a directory with its content, and every folder."""
    return {
        str(each.relative_to(path)): os.readlink(each)
        if each.is_symlink()
        else each.read_bytes()
        if each.is_file()
        else None
        for each in path.rglob("*")
    }


@pytest.fixture
def earlier(tmp_path):
    """A run with a link to a folder outside of it."""
    run = RunDirectory.create(tmp_path, "demo")
    run.write_config("old")
    (run.checkpoints / "step_1").mkdir()
    (run.checkpoints / "step_1" / "weights").write_bytes(b"old")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    (run.path / "link").symlink_to(tmp_path / "outside")
    return run


def begin_and_write(start, text):
    """Write what a start writes before it is refused or confirmed."""
    start.directory.write_config(text)
    (start.directory.checkpoints / "step_1").mkdir()
    (start.directory.logs / "engine.log").write_text(text)


@pytest.mark.parametrize("error", [ConfigError("no"), asyncio.CancelledError(), KeyboardInterrupt()])
def test_a_refused_start_leaves_no_folder(tmp_path, error):
    for _ in range(2):
        with pytest.raises(type(error)), RunStart(tmp_path, "demo") as start:
            begin_and_write(start, "new")
            raise error
        assert list(tmp_path.iterdir()) == []


def test_a_refused_overwriting_start_keeps_the_run(tmp_path, earlier):
    before = contents(tmp_path)
    with pytest.raises(ConfigError), RunStart(tmp_path, "demo", overwrite=True) as start:
        assert "link" not in contents(earlier.path)
        begin_and_write(start, "new")
        raise ConfigError("no")
    assert contents(tmp_path) == before


def test_a_refused_resume_restores_the_config(tmp_path, earlier):
    before = contents(tmp_path)
    with pytest.raises(ConfigError), RunStart(tmp_path, "demo", resume=True) as start:
        start.directory.write_config("new")
        raise ConfigError("no")
    assert contents(tmp_path) == before


def test_a_summary_stays_until_the_resumed_run_has_begun(tmp_path, earlier):
    earlier.summary.write_text("{}")
    with pytest.raises(ConfigError), RunStart(tmp_path, "demo", resume=True):
        raise ConfigError("no")
    assert earlier.summary.exists()
    with RunStart(tmp_path, "demo", resume=True) as start:
        start.confirm()
    assert not earlier.summary.exists() and earlier.config.exists()


@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}])
def test_no_start_joins_or_replaces_a_run_that_goes_on(tmp_path, how):
    """Whatever kind of run it is, and from its first moment: one may not yet have written anything."""
    with RunStart(tmp_path, "demo") as first:
        begin_and_write(first, "new")
        before = contents(tmp_path)
        with raises_with((RecordError, ConfigError)), RunStart(tmp_path, "demo", **how):
            pass
        first.confirm()
        with raises_with((RecordError, ConfigError)), RunStart(tmp_path, "demo", **how):
            pass
        assert contents(tmp_path) == before
    if how:
        with RunStart(tmp_path, "demo", **how):
            pass


def test_what_is_partly_deleted_does_not_come_back(tmp_path, earlier, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    with (
        monkeypatch.context() as patch,
        pytest.raises(KeyboardInterrupt),
        RunStart(tmp_path, "demo", overwrite=True) as start,
    ):
        start.directory.write_config("new")
        patch.setattr("shutil.rmtree", fail)
        start.confirm()
    with RunStart(tmp_path, "demo", resume=True) as start:
        assert start.directory.config.read_text() == "new"
    assert not [each for each in earlier.path.iterdir() if each.name.startswith(".")]


def test_a_confirmed_start_replaces_the_run_whole(tmp_path, earlier):
    with pytest.raises(ConfigError), RunStart(tmp_path, "demo", overwrite=True) as start:
        start.confirm()
        assert sorted(contents(earlier.path)) == ["checkpoints", "logs"]
        begin_and_write(start, "new")
        raise ConfigError("too late to be a refusal")
    assert sorted(contents(earlier.path)) == [
        "checkpoints",
        "checkpoints/step_1",
        "config.yaml",
        "logs",
        "logs/engine.log",
    ]
    assert (tmp_path / "outside" / "kept").exists()


@pytest.mark.parametrize("how", ["overwrite", "resume"])
def test_logs_of_a_dead_worker_stay_until_the_next_start(tmp_path, earlier, how):
    before = contents(tmp_path)
    with pytest.raises(WorkerDiedError), RunStart(tmp_path, "demo", overwrite=True) as start:
        begin_and_write(start, "new")
        raise WorkerDiedError("see the log")
    assert (earlier.logs / "engine.log").read_text() == "new"
    with pytest.raises(ConfigError), RunStart(tmp_path, "demo", **{how: True}):
        raise ConfigError("no")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("operation", range(1, 16))
def test_a_start_killed_anywhere_loses_no_run(tmp_path, earlier, operation):
    """The process is killed at its n-th rename or removal, in a start that is refused; a later one finds the run."""
    before = contents(tmp_path)
    script = f"""
import os, signal, sys
from antiphon.core.errors import ConfigError
from antiphon.record.run_start import RunStart
from antiphon.record.store import LedgerStore
left = {operation}
def count(event, arguments):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
with RunStart({str(tmp_path)!r}, "demo", overwrite=True) as start:
    (start.directory.logs / "engine.log").write_text("new")
    (start.directory.path / "config.yaml").write_text("new")
    raise ConfigError("no")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.raises(ConfigError), RunStart(tmp_path, "demo", overwrite=True):
        raise ConfigError("no")
    assert contents(tmp_path) == before


def test_a_taken_name_is_refused_and_kept(tmp_path, earlier):
    before = contents(tmp_path)
    with raises_with(ConfigError, match=r"name=.*--overwrite", path=earlier.path), RunStart(tmp_path, "demo"):
        pass
    with raises_with(ConfigError, path=tmp_path / "other"), RunStart(tmp_path, "other", resume=True):
        pass
    assert contents(tmp_path) == before


@pytest.mark.parametrize("how", ["overwrite", "resume"])
def test_a_run_that_another_process_writes_is_kept(tmp_path, earlier, how):
    store = LedgerStore(earlier.path)
    before = contents(tmp_path)
    with raises_with(RecordError, path=earlier.path), RunStart(tmp_path, "demo", **{how: True}):
        pass
    assert contents(tmp_path) == before
    store.close()
    with RunStart(tmp_path, "demo", **{how: True}):
        pass


def test_what_no_run_wrote_is_never_removed(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").touch()
    with (
        raises_with(ConfigError, path=tmp_path / "thesis"),
        RunStart(tmp_path, "thesis", overwrite=True),
    ):
        pass
    assert (tmp_path / "thesis" / "chapter.txt").exists()
