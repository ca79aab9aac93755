"""The summary of a run."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from antiphon.core.types import Prompt
from antiphon.rollout.evaluation import Evaluation, bootstrap_interval
from antiphon.run.components import Progress
from antiphon.run.config import EvaluationConfig


def summarize_accuracy(
    progress: Progress, after: Evaluation | None, settings: EvaluationConfig, test: Sequence[Prompt]
) -> dict[str, Any]:
    """Return accuracies before and after training, and the confidence interval of the gain; None without test prompts."""
    if not (progress.before and after):
        return {"accuracy_before": None, "accuracy_after": None}
    before, accuracies = np.array(progress.before), after.correct.mean(axis=1)
    return {
        "accuracy_before": float(before.mean()),
        "accuracy_after": after.accuracy,
        "gain_interval": bootstrap_interval(accuracies - before),
        "test_prompts": len(before),
        "evaluation": {"samples": settings.samples, "temperature": settings.resolve_temperature(settings.samples)},
        "tasks": _summarize_tasks(test, before, accuracies),
        "measures_before": progress.measures,
        "measures_after": after.measures,
    }


def _summarize_tasks(test: Sequence[Prompt], before: np.ndarray, after: np.ndarray) -> dict[str, dict[str, float]]:
    """Average the accuracies [P] of test prompts over the prompts of each task."""
    tasks = np.array([prompt.task for prompt in test])
    return {
        str(task): {
            "accuracy_before": float(before[tasks == task].mean()),
            "accuracy_after": float(after[tasks == task].mean()),
        }
        for task in np.unique(tasks)
    }
