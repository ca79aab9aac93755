"""The run directory: what is written is whole or not there."""

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.core.errors import ConfigError, RecordError
from antiphon.record.run_dir import RunDirectory, atomic_write, convert_write_errors, write_json
from tests.raising import raises_with

ROOT = Path(__file__).parents[3]


def test_a_run_has_its_places(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "demo")
    run.write_config("name: demo\n")
    run.write_summary({"accuracy_after": 0.5, "loss": float("nan"), "steps": [1, float("inf")]})
    assert run.config.read_text() == "name: demo\n"
    assert json.loads(run.summary.read_text()) == {"accuracy_after": 0.5, "loss": None, "steps": [1, None]}
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "config.yaml", "logs", "summary.json"]


def test_a_name_that_is_taken_is_refused_with_both_ways_out(tmp_path):
    RunDirectory.create(tmp_path, "demo").write_config("a")
    with raises_with(ConfigError, match=r"name=.*--overwrite", path=tmp_path / "demo"):
        RunDirectory.create(tmp_path, "demo")


def test_an_empty_directory_is_no_run(tmp_path):
    (tmp_path / "demo").mkdir()
    for _ in range(2):  # the second finds the folders of a run that came no further
        RunDirectory.create(tmp_path, "demo")


def test_a_kill_before_the_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    script = f"""
import os, signal, sys
from pathlib import Path
from antiphon.record.run_dir import atomic_write
with atomic_write(Path({str(path)!r})) as file:
    file.write(b'{{"step": 2}}')
    file.flush()
    os.fsync(file.fileno())
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert json.loads(path.read_text()) == {"step": 1}
    write_json(path, {"step": 3})  # what the dead process left is in nobody's way
    assert json.loads(path.read_text()) == {"step": 3}


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    with pytest.raises(TypeError), atomic_write(path) as file:
        file.write(b"half")
        raise TypeError
    with pytest.raises(TypeError):
        write_json(path, {"step": object()})
    assert json.loads(path.read_text()) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_takes_no_more_is_one_clear_error(tmp_path, number):
    with raises_with(RecordError, match="so it is", path=tmp_path) as caught, convert_write_errors(tmp_path):
        raise OSError(number, "so it is")
    assert str(tmp_path) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(ConnectionResetError), convert_write_errors(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "not of a disk")
    with convert_write_errors(tmp_path):
        pass


def test_a_run_that_goes_on_is_one_that_was_begun(tmp_path):
    RunDirectory.create(tmp_path, "demo")
    with raises_with(ConfigError, path=tmp_path / "demo"):
        RunDirectory.resume(tmp_path, "demo")
    RunDirectory.create(tmp_path, "demo").write_config("a")
    assert RunDirectory.resume(tmp_path, "demo").path == tmp_path / "demo"


def test_every_file_of_a_run_has_its_own_place_inside(tmp_path):
    run = RunDirectory(tmp_path)
    places = [getattr(run, name) for name, kind in vars(RunDirectory).items() if isinstance(kind, property)]
    assert len(places) > 5 and len({*places}) == len(places)
    assert all(place.parent == tmp_path for place in places)
