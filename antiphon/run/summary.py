"""The summary of a run."""

from typing import Any

import numpy as np

from antiphon.rollout.evaluation import Evaluation, bootstrap_interval
from antiphon.run.components import Progress
from antiphon.run.config import RunConfig


def summarize_accuracy(progress: Progress, after: Evaluation | None, config: RunConfig) -> dict[str, Any]:
    """Return accuracies before and after training, and the confidence interval of the gain.

    They are None without test prompts. Those before training, and the gain, are None for a run that branched off another one
    with other test prompts, or was resumed with another number of them. Tasks that are only evaluated count in their own
    accuracies alone.
    """
    if not after:
        return {"accuracy_before": None, "accuracy_after": None}
    settings = config.evaluation
    known = progress.before
    before = dict(zip(after.prompt_ids, known, strict=True)) if after.matches(known) else None
    trained = _summarize(after.without(config.only_evaluated), before)
    return {
        "accuracy_before": trained["accuracy_before"],
        "accuracy_after": trained["accuracy_after"],
        "gain_interval": trained["gain_interval"],
        "test_prompts": trained["test_prompts"],
        "evaluation": {"samples": settings.samples, "temperature": settings.resolve_temperature(settings.samples)},
        "tasks": {task: _summarize(own, before) for task, own in sorted(after.by_task().items())},
        "measures_before": progress.measures if before else {},
        "measures_after": after.measures,
    }


def _summarize(after: Evaluation, before: dict[str, float] | None) -> dict[str, Any]:
    """Return the accuracies of some prompts, with intervals; `before` has the accuracy of each prompt before training."""
    found = {
        "accuracy_after": after.accuracy,
        "interval_after": after.interval(),
        "test_prompts": len(after.prompt_ids),
    }
    if before is None:
        return found | {"accuracy_before": None, "interval_before": None, "gain_interval": None}
    own = np.array([before[name] for name in after.prompt_ids])
    gain = bootstrap_interval(after.accuracies - own)
    return found | {
        "accuracy_before": float(own.mean()),
        "interval_before": bootstrap_interval(own),
        "gain_interval": gain,
    }
