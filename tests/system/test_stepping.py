"""Runs that are trained step by step, and run directories that are looked at from Python."""

import asyncio
import json
import os
import signal

import pandas
import pytest

import antiphon
from antiphon.core.errors import DataError, RecordError, UserCodeError
from antiphon.inspect.audit import audit

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


def digits(prompt, transcript):
    return sum(character.isdigit() for character in transcript.response) / 6


@pytest.fixture
def given(tmp_path, model):
    rollout = {"groups_per_step": 2, "group_size": 4, "timeout": 180, "sampling": {"max_tokens": 6}}
    record = {"directory": str(tmp_path / "runs"), "live": "off"}
    config = {"name": "run", "steps": 4, "rollout": rollout, "record": record, "cluster": {"debug": True}}
    return {"config": config, "model": model, "prompts": ROWS, "reward": digits}


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_async_iteration_yields_every_step(given):
    async def main():
        seen = []
        async with antiphon.start_run(**given) as run:
            async for step in run:
                assert len(lines(run.directory)) == step.step  # the next one has not begun to be trained
                seen.append((step.step, step["reward/mean"]))
        return run.directory, seen

    directory, seen = asyncio.run(main())
    assert seen == [(line["step"], line["reward/mean"]) for line in lines(directory)]
    assert [step for step, _ in seen] == [1, 2, 3, 4]
    assert json.loads((directory / "summary.json").read_text())["steps"] == 4


@pytest.mark.parametrize("in_loop", [False, True])
def test_plain_iteration_that_breaks_off_can_be_resumed(given, in_loop):
    def first():
        with antiphon.start_run(**given) as run:
            for step in run:
                assert list(run.metrics().index) == [*range(1, step.step + 1)]
                if step.step == 2:
                    break
        return run.directory

    async def cell():
        return first()

    directory = asyncio.run(cell()) if in_loop else first()
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["stopped_early"]
    with antiphon.start_run(**given, resume=True) as run:
        assert [step.step for step in run] == [3, 4]
    found = audit(directory)
    assert found.violations == [] and found.open == 0


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_loop_body_ends_the_run(given, error):
    with pytest.raises(error), antiphon.start_run(**given) as run:
        for _ in run:
            raise error
    assert len(lines(run.directory)) == 1 and audit(run.directory).open == 0
    assert not (run.directory / "summary.json").exists()


def test_an_error_of_the_run_is_raised_where_it_is_iterated(given):
    def fails(group):
        raise KeyError("no such column")

    with (
        pytest.raises(UserCodeError, match="no such column"),
        antiphon.start_run(**given, **{"rollout.filter": fails}) as run,
    ):
        for _ in run:
            pass


def test_a_start_that_fails_raises_at_once(given):
    with pytest.raises(DataError, match="split"), antiphon.start_run(**given | {"prompts": {"test": ROWS}}):
        raise AssertionError("the run has started")


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_notebook_ends_the_run(given, tmp_path, times):
    """The cell's thread gets the signal, and the run's thread ends the run: after the step, or at once the second time."""
    sent = []

    def keep(group):
        if len(sent) < times:
            sent.append(group)
            os.kill(os.getpid(), signal.SIGINT)
        return True

    async def cell():
        return antiphon.train(**given, **{"rollout.filter": keep})

    loop = asyncio.new_event_loop()  # as a kernel's: that of asyncio.run would handle the signal itself
    try:
        result = loop.run_until_complete(cell())
    except KeyboardInterrupt:
        assert times == 2, "the run had not ended yet"  # when the second came, which nobody handled any more
    else:
        assert result.exit_code == 130
        assert result.summary.get("stopped_early") or times == 2
    finally:
        loop.close()
    assert audit(tmp_path / "runs" / "run").open == 0


def test_a_run_directory_can_be_looked_at(given):
    result = antiphon.train(**given)
    run = antiphon.open_run(result.directory)
    assert run.summary == result.summary and run.config["name"] == "run"
    assert list(run.metrics()["reward/mean"]) == [line["reward/mean"] for line in lines(result.directory)]
    trained = run.attempts("trained")
    assert len(trained) == 4 * 8 and len(run.attempts()) >= len(trained)
    assert set(pandas.DataFrame(run.attempts())["status"]) >= {"trained"}
    assert dict(run.why(trained[0]))["attempt"] == trained[0].name
    samples = list(run.rollouts(step=2, order="best"))
    assert len(samples) == 8 and all(sample.row.step == 2 for sample in samples)
    assert samples[0].row.score == max(sample.row.score for sample in samples)
    assert any(row["prompt"] in samples[0].text for row in ROWS)
    assert run.audit().violations == []


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(RecordError):
        antiphon.open_run(tmp_path)
