"""Accuracy, pass@k and intervals against counting."""

import asyncio
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError
from antiphon.core.types import (
    AttemptStatus,
    Message,
    PolicyVersion,
    Prompt,
    Sampling,
    Score,
    Trajectory,
    TrajectoryMeta,
)
from antiphon.rollout.evaluation import Evaluation, TaskPlan, bootstrap_interval, evaluate
from antiphon.tasks.base import FLAG_PREFIX


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(1, 4))
def test_pass_at_k_counts_every_choice_of_k_samples(rows, k):
    correct = np.array(rows)
    names = tuple(map(str, range(len(rows))))
    evaluation = Evaluation(prompt_ids=names, tasks=("t",) * len(rows), correct=correct, ungraded=0, truncated=0.0)
    counted = np.mean([np.mean([any(choice) for choice in combinations(row, k)]) for row in rows])
    assert evaluation.pass_at(k) == pytest.approx(counted)
    assert evaluation.accuracy == pytest.approx(correct.mean())
    low, high = evaluation.interval()
    assert low - 1e-9 <= evaluation.accuracy <= high + 1e-9


def test_interval_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        low, high = bootstrap_interval(generator.random(100) < 0.3, seed=trial)
        covered += low <= 0.3 <= high
    assert 0.90 <= covered / 200 <= 0.99


def test_a_sample_without_a_verdict_is_wrong_and_counted():
    scores = {
        0: Score.of(1.0, turns=3.0, **{f"{FLAG_PREFIX}empty": 1.0}),
        1: replace(Score.ungraded("timed out"), parts={"turns": 9.0}),
        2: Score.of(0.4, turns=5.0, success=0.0),
    }

    async def run(prompt, attempt, sampling):
        version = PolicyVersion(0, 0)
        return Trajectory(
            meta=TrajectoryMeta(
                id=attempt,
                prompt_id=prompt.id,
                task="t",
                started=version,
                newest=version,
                status=AttemptStatus.FINISHED,
                score=scores[int(prompt.id)],
            ),
            payload=(),
        )

    prompts = [Prompt(id=str(i), task="t", messages=(Message("user", "?"),)) for i in range(3)]
    evaluation = asyncio.run(evaluate(prompts, {"t": TaskPlan(samples=2, sampling=Sampling(max_tokens=1))}, run))
    assert [row.tolist() for row in evaluation.correct] == [[True, True], [False, False], [False, False]]
    assert evaluation.ungraded == 2
    assert evaluation.measures == {"t/score": pytest.approx(0.7), "t/turns": 4.0, "t/success": 0.0}


def scored_run(scores, seen):
    """Return a runner whose attempts have the score under their prompt's id; it notes the sampling of each."""

    async def run(prompt, attempt, sampling):
        seen.append((prompt.task, attempt.sibling, sampling.temperature))
        version = PolicyVersion(0, 0)
        score, status = scores[prompt.id], AttemptStatus.FINISHED
        meta = TrajectoryMeta(
            id=attempt,
            prompt_id=prompt.id,
            task=prompt.task,
            started=version,
            newest=version,
            status=status,
            score=score,
        )
        return Trajectory(meta=meta, payload=())

    return run


def test_each_task_says_how_often_it_is_sampled_and_what_a_success_is():
    prompts = [
        Prompt(id=name, task=name[0], messages=(Message("user", "?"),)) for name in ("a0", "a1", "b0", "b1", "b2")
    ]
    scores = {"a0": Score.of(0.5), "a1": Score.of(0.4), "b1": Score.of(9.0, won=0.0), "b2": Score.ungraded("late")}
    scores["b0"] = Score.of(0.0, won=1.0)
    plans = {
        "a": TaskPlan(samples=1, sampling=Sampling(max_tokens=1, temperature=0.0), success_at=0.5),
        "b": TaskPlan(samples=3, sampling=Sampling(max_tokens=1, temperature=0.7), success_part="won"),
        "unused": TaskPlan(samples=9, sampling=Sampling(max_tokens=1), success_part="nothing"),
    }
    seen = []
    found = asyncio.run(evaluate(prompts, plans, scored_run(scores, seen)))
    drawn = [("a", 0, 0.0)] * 2 + [("b", sibling, 0.7) for sibling in range(3)] * 3
    assert sorted(seen) == sorted(drawn)
    assert found.accuracies.tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert found.accuracy == pytest.approx(2 / 5) and found.samples == 1
    assert {task: own.accuracy for task, own in found.by_task().items()} == {"a": 0.5, "b": pytest.approx(1 / 3)}
    assert found.by_task()["b"].pass_at(3) == pytest.approx(1 / 3)
    assert found.without({"b"}).prompt_ids == ("a0", "a1")
    assert found.without({"a", "b"}) is found
    curves = found.curves()
    assert set(curves) == {f"accuracy/{name}" for name in ("a", "a/low", "a/high", "b", "b/low", "b/high")}
    assert (curves["accuracy/a/low"], curves["accuracy/a/high"]) == bootstrap_interval(np.array([1.0, 0.0]))


def test_difficulty_is_what_was_solved_before_training():
    correct = [np.array(row, bool) for row in ([1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 1])]
    found = Evaluation(prompt_ids=tuple("abcde"), tasks=("t",) * 5, correct=correct, ungraded=0, truncated=0.0)
    curves = found.curves([0.0, 1 / 3, 0.3, 2 / 3, 1.0])
    levels = {name.removeprefix("difficulty/"): value for name, value in curves.items() if "difficulty" in name}
    assert levels == {"hard": pytest.approx(1 / 6), "medium": pytest.approx(5 / 6), "easy": pytest.approx(1 / 3)}
    assert not [name for name in found.curves([]) if "difficulty" in name]
    assert not [name for name in found.curves([0.5]) if "difficulty" in name]  # it is of other prompts


def test_a_part_that_no_score_has_is_an_error_with_those_there_are():
    prompts = [Prompt(id="a", task="a", messages=(Message("user", "?"),))]
    plans = {"a": TaskPlan(samples=1, sampling=Sampling(max_tokens=1), success_part="wno")}
    with pytest.raises(ConfigError, match="task 'a': no score has a part 'wno'; parts are won"):
        asyncio.run(evaluate(prompts, plans, scored_run({"a": Score.of(1.0, won=1.0)}, [])))
    assert asyncio.run(evaluate(prompts, plans, scored_run({"a": Score.ungraded("late")}, []))).accuracy == 0.0
