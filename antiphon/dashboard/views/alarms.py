"""Alarms of reward hacking that a run raised, and where to find the attempts behind each."""

from dataclasses import dataclass

import numpy as np

from antiphon.dashboard.curves import MetricTable
from antiphon.record.alarm_thresholds import FLAG_THRESHOLD, THRESHOLDS, exceeds_threshold
from antiphon.record.metric_descriptions import describe_metric

MOST_ALARMS = 100
# Filters of the rollouts that show what a measure is about; flags have one of their own.
SAMPLES = {
    "ungraded": {"status": "failed"},
    "constant": {"sort": "best"},
    "length": {"sort": "longest"},
    "repetition": {"sort": "best"},
    "duplicates": {"sort": "best"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One measure that was above its threshold.

    Attributes:
        task: The task.
        measure: Its name: a flag, or a measure such as `length`.
        metric: The metric that has it.
        meaning: One sentence about it.
        threshold: Its threshold.
        since: First step at which it was above.
        steps: Number of steps at which it was above.
        value: Its newest value.
        is_raised: True if the newest value is above.
        samples: Parameters of the rollouts page that shows the attempts.
    """

    task: str
    measure: str
    metric: str
    meaning: str
    threshold: float
    since: int
    steps: int
    value: float
    is_raised: bool
    samples: dict[str, str]


def list_alarms(table: MetricTable) -> list[Alarm]:
    """Return the alarms of a run: those that are raised now first, then by their first step."""
    found = []
    for metric in table.match("watch/*/*"):
        _, task, measure = metric.split("/")
        values = table.column(metric)
        known = np.flatnonzero(np.isfinite(values))
        above = [place for place in known.tolist() if exceeds_threshold(measure, float(values[place]))]
        if not above:
            continue
        newest = float(values[known[-1]])
        samples = SAMPLES.get(measure, {"flag": measure})
        if measure == "length" and newest < 0:
            samples = {"sort": "shortest"}
        found.append(
            Alarm(
                task=task,
                measure=measure,
                metric=metric,
                meaning=describe_metric(metric),
                threshold=THRESHOLDS.get(measure, FLAG_THRESHOLD),
                since=table.steps[above[0]],
                steps=len(above),
                value=newest,
                is_raised=exceeds_threshold(measure, newest),
                samples={"task": task, **samples},
            )
        )
    return sorted(found, key=lambda alarm: (not alarm.is_raised, alarm.since))[:MOST_ALARMS]
