"""`checkpoint.upload` in whole runs: what arrives elsewhere is whole, and a command that fails or hangs costs no run."""

from contextlib import suppress

import psutil
from transformers import AutoModelForCausalLM

from antiphon.record.checkpoint import verify_checkpoint
from tests.system.test_offline_resume import start


def test_each_checkpoint_arrives_whole(project):
    """Also those that the run removes."""
    place = project.folder / "elsewhere"
    place.mkdir()
    copy = f'cp -r "$ANTIPHON_CHECKPOINT" "{place}/" && echo "$ANTIPHON_RUN"'
    path = project.config(steps=3, checkpoint={"every": 1, "keep_last": 1, "upload": copy})
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    found = sorted(place.iterdir())
    assert [each.name for each in found] == [f"step_00000{step}" for step in range(4)]
    for each in found:
        verify_checkpoint(each)
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(found[-1]).parameters()) > 1000
    run = project.folder / "runs" / "run"
    assert [each.name for each in (run / "checkpoints").iterdir()] == ["step_000003"]
    assert (run / "logs" / "upload.log").read_text() == "run\n" * 4


def test_those_of_an_offline_run_do_too(project):
    place = project.folder / "elsewhere"
    place.mkdir()
    upload = f'checkpoint.upload=cp -r "$ANTIPHON_CHECKPOINT" "{place}/"'
    done = start(project, "dpo", "checkpoint.every=4", "checkpoint.keep_last=1", upload)
    assert done.returncode == 0, done.stderr
    assert sorted(each.name for each in place.iterdir()) == [f"step_00000{step}" for step in (0, 4, 8, 9)]
    for each in place.iterdir():
        verify_checkpoint(each)


def test_a_command_that_fails_is_reported(project):
    path = project.config(steps=1, checkpoint={"every": 0, "upload": "echo no such bucket >&2; exit 3"})
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    assert "checkpoint.upload: the command for step_000001 ended with exit code 3" in done.stdout + done.stderr
    assert (project.folder / "runs" / "run" / "logs" / "upload.log").read_text() == "no such bucket\n"


def test_a_command_that_hangs_is_killed_with_what_it_started(project):
    file = project.folder / "pid"
    path = project.config(
        steps=1, checkpoint={"every": 0, "timeout": 20, "upload": f"sleep 1000 & echo $! > {file}; wait"}
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    assert "step_000001 did not end in 20 s (checkpoint.timeout)" in done.stdout + done.stderr
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(file.read_text())).wait(60)
