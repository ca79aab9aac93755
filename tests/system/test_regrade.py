"""Grading a run again from its record, by a real run and real graders."""

import pandas
import pytest

pytestmark = pytest.mark.system


def test_a_run_graded_again(project):
    path = project.config(evaluation={}, steps=2)
    assert project.run("train", path).returncode == 0
    run = project.folder / "runs" / "run"
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and "ledger" not in file.name}

    same = project.run("regrade", run, "--code", project.folder)
    assert same.returncode == 0, same.stderr
    assert "0 of " in same.stdout
    table = pandas.read_parquet(run / "regraded" / "again.parquet")
    recorded = pandas.read_parquet(run / "rollouts")
    assert len(table) == len(recorded) > 0
    assert (table.before == table.after).all() and (table.status == "scored").all()
    assert set(table.step.dropna()) == {1, 2}

    other = project.run("regrade", run, "--code", project.folder, "--reward", "mytask:raises")
    assert other.returncode == 0, other.stderr
    assert f"{len(table)} of {len(table)} scores changed" in other.stdout
    table = pandas.read_parquet(run / "regraded" / "mytask_raises.parquet")
    assert table.after.isna().all() and table.detail.str.contains("no such column in my table").all()
    assert all(file.read_bytes() == content for file, content in before.items())


def test_what_cannot_be_regraded_is_named(project):
    path = project.config(steps=1)
    assert project.run("train", path).returncode == 0
    run = project.folder / "runs" / "run"
    for arguments, message in [
        (("--reward", "maths"), "did you mean 'math'"),
        (("--reward", "math", "--task", "sums"), "there is no task 'sums'; the run has digits"),
        (("--option", "a=1"), "--reward"),
        (("--reward", "math", "--option", "a"), "must be KEY=VALUE"),
    ]:
        done = project.run("regrade", run, "--code", project.folder, *arguments)
        assert done.returncode == 2 and message in done.stderr, done.stderr
