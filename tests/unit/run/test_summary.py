"""The gain of a run, and a resume with other test prompts than before training."""

from types import SimpleNamespace

import numpy as np
import pytest

from antiphon.rollout.evaluation import Evaluation
from antiphon.run.components import Progress
from antiphon.run.config import EvaluationConfig
from antiphon.run.evaluations import Evaluations
from antiphon.run.summary import summarize_accuracy

AFTER = Evaluation(
    prompt_ids=("a", "b"), tasks=("t", "t"), correct=[np.array([True]), np.array([True])], ungraded=0, truncated=0.0
)


@pytest.mark.parametrize(
    ("before", "accuracy"), [([0.0, 1.0], 0.5), ([0.0], None), ([0.0, 1.0, 1.0], None), ([], None), (None, None)]
)
def test_a_gain_needs_the_prompts_of_before(before, accuracy):
    config = SimpleNamespace(evaluation=EvaluationConfig(), only_evaluated=frozenset())
    summary = summarize_accuracy(Progress(before=before, measures={"t/score": 0.5}), AFTER, config)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (accuracy, 1.0)
    assert (summary["gain_interval"] is None) == (accuracy is None) == (not summary["measures_before"])
    difficulties = {name for name in AFTER.curves(before) if name.startswith("difficulty/")}
    assert difficulties == ({"difficulty/hard", "difficulty/easy"} if accuracy else set())


@pytest.mark.parametrize(("before", "messages"), [([0.0], 1), ([0.0, 1.0], 0), (None, 0)])
def test_a_resume_with_other_test_prompts_is_told(before, messages):
    told = []
    config = SimpleNamespace(evaluation=EvaluationConfig(), rollout=SimpleNamespace(deterministic=False))
    resumption = SimpleNamespace(state={"progress": {"before": before}})
    record = SimpleNamespace(resumption=resumption, view=SimpleNamespace(message=told.append))
    Evaluations(SimpleNamespace(config=config, record=record, tasks=SimpleNamespace(test=["a", "b"])))
    assert len(told) == messages
