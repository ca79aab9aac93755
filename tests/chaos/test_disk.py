"""A run whose disk is full, or cannot be written to, ends with one clear error, loses nothing, and goes on when it can."""

import os
import subprocess

import pytest

from antiphon.record.audit import audit

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
def test_a_disk_that_takes_no_more_ends_a_run_that_goes_on_when_it_does(project, disk):
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
