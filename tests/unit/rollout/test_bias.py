"""What scheduling does to the data, against plain counting over attempts whose fates are known."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    Group,
    GroupOutcome,
    PolicyVersion,
    Prompt,
    Score,
    Timing,
    Trajectory,
    TrajectoryMeta,
)
from antiphon.rollout.selection_bias import BiasMeter

NOW = PolicyVersion(0, 0)
attempts = st.fixed_dictionaries(
    {
        "task": st.sampled_from("ab"),
        "prompt": st.sampled_from("pqr"),
        "tokens": st.integers(1, 50),
        "score": st.none() | st.sampled_from([0.25, 0.5, 1.0]),
        "queued": st.integers(0, 5),
        "seconds": st.integers(1, 60),
        "fate": st.sampled_from(["trained", "finished", "cancelled", "stale"]),
    }
)


def meta_of(number, attempt):
    return TrajectoryMeta(
        id=AttemptId(number, 0, 0),
        prompt_id=attempt["prompt"],
        task=attempt["task"],
        started=NOW,
        newest=NOW,
        status=AttemptStatus.FINISHED,
        score=Score.ungraded("no verdict") if attempt["score"] is None else Score.of(attempt["score"]),
        completion_tokens=attempt["tokens"],
        timing=Timing(queued=attempt["queued"], finished=attempt["queued"] + attempt["seconds"]),
    )


def group_of(number, attempt):
    prompt = Prompt(id=attempt["prompt"], task=attempt["task"], messages=(), seed=0)
    trajectory = Trajectory(meta=meta_of(number, attempt), payload=())
    return Group(id=number, prompt=prompt, trajectories=(trajectory,), outcome=GroupOutcome.COMPLETE)


def metered(attempts):
    meter = BiasMeter()
    for number, attempt in enumerate(attempts):
        meter.record_dispatch(attempt["task"], attempt["prompt"])
        if attempt["fate"] in ("trained", "finished"):
            meter.record_finish(meta_of(number, attempt))
        if attempt["fate"] == "trained":
            meter.record_training(group_of(number, attempt))
        if attempt["fate"] == "cancelled":
            meter.record_drop(AttemptStatus.CANCELLED, attempt["seconds"])
        if attempt["fate"] == "stale":
            meter.record_drop(AttemptStatus.STALE, attempt["seconds"])
    return meter


def excess(ones, others):
    """How much greater the mean of ones is, in shares of that of others; 0 where either is not known."""
    ones, others = ([value for value in side if value is not None] for side in (ones, others))
    return statistics.fmean(ones) / statistics.fmean(others) - 1 if ones and others else 0.0


@given(st.lists(attempts, max_size=30))
def test_the_meter_counts(attempts):
    meter = metered(attempts)
    found = meter.metrics()
    fates = {fate: [a for a in attempts if a["fate"] in fate.split()] for fate in ("trained", "trained finished")}
    dropped = [a for a in attempts if a["fate"] in ("cancelled", "stale")]
    trained, finished = fates["trained"], fates["trained finished"]
    for name, field, others in (
        ("length", "tokens", finished),
        ("score", "score", finished),
        ("seconds", "seconds", dropped),
    ):
        expected = excess([a[field] for a in trained], [a[field] for a in others])
        assert found[f"bias/{name}"] == pytest.approx(expected), name
    tried, learned = ({a["task"] for a in some} for some in (attempts, trained))
    assert meter.list_untrained_tasks() == sorted(tried - learned)
    tried, learned = ({a["prompt"] for a in some} for some in (attempts, trained))
    assert found["bias/prompts_never_trained"] == pytest.approx(len(tried - learned) / len(tried) if tried else 0.0)
    for fate in ("cancelled", "stale"):
        assert found.get(f"drops/{AttemptStatus(fate)}", 0) == sum(a["fate"] == fate for a in attempts)


@given(st.lists(attempts, min_size=1, max_size=30))
def test_task_shares_are_compared_with_dispatched_ones(attempts):
    meter = metered(attempts)
    found = meter.metrics()
    tasks = [a["task"] for a in attempts]
    trained = [a["task"] for a in attempts if a["fate"] == "trained"]
    if len(set(tasks)) < 2:
        assert not any(name.startswith("bias/task") for name in found)
        return
    for task in set(tasks):
        share = trained.count(task) / len(trained) if trained else 0.0
        assert found[f"bias/task/{task}"] == pytest.approx(share / (tasks.count(task) / len(tasks)) - 1)


def test_a_prompt_that_was_trained_on_once_stays_so():
    """Also when it is dispatched again, in a later epoch."""
    meter = BiasMeter()
    attempt = {"task": "a", "prompt": "p", "tokens": 3, "score": 1.0, "queued": 0, "seconds": 1}
    for number in range(2):
        meter.record_dispatch("a", "p")
        if number == 0:
            meter.record_training(group_of(number, attempt))
    assert meter.metrics()["bias/prompts_never_trained"] == 0.0
