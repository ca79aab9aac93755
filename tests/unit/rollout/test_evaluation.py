"""Accuracy, pass@k and intervals against counting."""

import asyncio
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.types import (
    AttemptStatus,
    Message,
    PolicyVersion,
    Prompt,
    Score,
    Trajectory,
    TrajectoryMeta,
)
from antiphon.rollout.evaluation import Evaluation, bootstrap_interval, evaluate
from antiphon.tasks.base import FLAG_PREFIX


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(1, 4))
def test_pass_at_k_counts_every_choice_of_k_samples(rows, k):
    correct = np.array(rows)
    evaluation = Evaluation(
        prompt_ids=tuple(map(str, range(len(rows)))), correct=correct, scores=correct * 1.0, ungraded=0, truncated=0.0
    )
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

    async def run(prompt, attempt):
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
    evaluation = asyncio.run(evaluate(prompts, 2, run))
    assert evaluation.correct.tolist() == [[True, True], [False, False], [False, False]]
    assert evaluation.ungraded == 2
    assert evaluation.measures == {"t/score": pytest.approx(0.7), "t/turns": 4.0, "t/success": 0.0}
