"""A run whose disk is full, or cannot be written to, ends with one clear error, loses nothing, and goes on when it can."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from antiphon.core.config import load
from antiphon.core.errors import RecordError
from antiphon.inspect.audit import audit
from antiphon.offline.config import RewardModelConfig
from antiphon.offline.run import reward_model
from tests.raising import raises_with

SIZE = 64 << 20  # bytes


class Disk:
    """A file system of its own, in memory."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()

    def mount(self, options):
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.folder], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")

    def remount(self, options):
        subprocess.run(["mount", "-o", f"remount,{options}", self.folder], check=True)

    def room(self):
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize


@pytest.fixture
def disk(tmp_path):
    found = Disk(tmp_path / "disk")
    found.mount(f"size={SIZE}")
    yield found
    subprocess.run(["umount", "--lazy", found.folder], check=True)


def settings(disk, steps):
    return {
        "steps": steps,
        "record": {"directory": str(disk.folder)},
        "rollout": {"async_ratio": 1},
        "checkpoint": {"every": 2},
    }


def one_line(error):
    said = [line for line in error.splitlines() if line.startswith("antiphon: ")]
    assert len(said) == 1 and "Traceback" not in error, error
    return said[0]


@pytest.mark.chaos
def test_run_ends_on_a_full_disk_and_resumes(project, disk):
    done = project.run("train", project.config(**settings(disk, 4)))
    assert done.returncode == 0, done.stderr

    disk.remount("ro")
    for command in (["--resume"], ["--overwrite"], ["name=other"]):
        done = project.run("train", project.config(**settings(disk, 8)), *command)
        assert done.returncode == 2
        assert str(disk.folder) in one_line(done.stderr)
    assert project.run("audit", disk.folder / "run").returncode == 0

    disk.remount("rw")
    used = SIZE - disk.room()
    for left in (16_384, 200_000):  # bytes: nothing can be begun; something can, and is not ended
        disk.remount(f"size={used + left}")
        done = project.run("train", project.config(**settings(disk, 40)), "--resume")
        assert done.returncode == 2
        assert "cannot be written" in one_line(done.stderr)

    disk.remount(f"size={SIZE}")
    done = project.run("train", project.config(**settings(disk, 8)), "--resume")
    assert done.returncode == 0, done.stderr
    assert not audit(disk.folder / "run").violations


@pytest.mark.chaos
def test_offline_run_ends_on_a_full_disk_and_restarts(project, disk):
    (project.folder / "pairs.jsonl").write_text(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "x"}))
    path = project.folder / "offline.yaml"
    settings = {
        "name": "run",
        "steps": 2,
        "model": {"path": str(project.model)},
        "data": {"source": "jsonl", "path": str(project.folder / "pairs.jsonl")},
        "cluster": {"debug": True},
        "record": {"directory": str(disk.folder), "live": "off"},
    }
    path.write_text(yaml.safe_dump(settings))
    run, model = load(path, model=RewardModelConfig), disk.folder / "run" / "model"

    def refused():
        with raises_with(RecordError, match="--overwrite") as caught:
            reward_model(run, overwrite=True)
        assert Path(caught.value.path).is_relative_to(disk.folder / "run")
        assert not model.exists()

    disk.remount("ro")
    refused()
    disk.remount("rw")
    page = os.sysconf("SC_PAGE_SIZE")
    (disk.folder / "another").write_bytes(bytes(page))
    for left in (0, 2 * page, 20 * page):  # nothing can be begun; something can; no model can be left behind
        disk.remount(f"size={page + left}")
        refused()
    disk.remount(f"size={SIZE}")
    reward_model(run, overwrite=True)
    assert model.is_dir()
