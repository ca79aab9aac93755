"""The summary of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from antiphon.core.types import Prompt
from antiphon.rollout.evaluation import Evaluation, bootstrap_interval
from antiphon.run.components import Progress
from antiphon.run.config import EvaluationConfig


def summarize_accuracy(
    progress: Progress, after: Evaluation | None, settings: EvaluationConfig, test: Sequence[Prompt]
) -> dict[str, Any]:
    """Return accuracies before and after training, and the confidence interval of the gain.

    They are None without test prompts. Those before training, and the gain, are None for a run that branched off another one
    with other test prompts.
    """
    if not after:
        return {"accuracy_before": None, "accuracy_after": None}
    accuracies = after.correct.mean(axis=1)
    before = np.array(progress.before) if progress.before else None
    return {
        "accuracy_before": None if before is None else float(before.mean()),
        "accuracy_after": after.accuracy,
        "gain_interval": None if before is None else bootstrap_interval(accuracies - before),
        "test_prompts": len(accuracies),
        "evaluation": {"samples": settings.samples, "temperature": settings.resolve_temperature(settings.samples)},
        "tasks": _summarize_tasks(test, {"accuracy_before": before, "accuracy_after": accuracies}),
        "measures_before": progress.measures,
        "measures_after": after.measures,
    }


def _summarize_tasks(
    test: Sequence[Prompt], accuracies: Mapping[str, np.ndarray | None]
) -> dict[str, dict[str, float | None]]:
    """Average each kind of accuracies [P] of test prompts, if there are any, over the prompts of each task."""
    tasks = np.array([prompt.task for prompt in test])
    return {
        str(task): {
            name: None if each is None else float(each[tasks == task].mean()) for name, each in accuracies.items()
        }
        for task in np.unique(tasks)
    }
