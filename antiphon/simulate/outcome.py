"""The measures of a simulated run."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from antiphon.core.deadlines import Deadlines


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a simulated run. Seconds are virtual."""

    summary: dict[str, Any]
    steps: list[dict[str, float]]  # the metrics of each
    attempts: int  # started before the last step ended
    sampled_tokens: int
    read_tokens: int
    requeued_tokens: int
    preemptions: int
    engines_idle: float  # share of the run's time, over all engines
    learner_idle: float

    def table(self) -> dict[str, float | int]:
        """Return the measures that `antiphon simulate` prints."""

        def column(name: str) -> list[float]:
            return [step[name] for step in self.steps]

        seconds = sum(column("step/seconds"))
        return {
            "steps": len(self.steps),
            "seconds a step": seconds / len(self.steps),
            "tokens a second, trained": sum(column("learner/tokens")) / seconds,
            "tokens a second, sampled": self.sampled_tokens / seconds,
            "share of time the learner is idle": self.learner_idle,
            "share of time the engines are idle": self.engines_idle,
            "age, mean": fmean(column("age/mean")),
            "age, max": max(column("age/max")),
            "groups dropped: stale": sum(column("groups/stale")),
            "groups dropped: filtered": sum(column("groups/filtered")),
            "groups dropped: failed": sum(column("groups/failed")),
            "length of trained relative to finished attempts": self.steps[-1]["bias/length"],
            "prompts tried and never trained on": self.steps[-1]["bias/prompts_never_trained"],
            "tokens prefilled": self.read_tokens,
            "tokens carried over from dead engines": self.requeued_tokens,
            "preemptions": self.preemptions,
        }


class MetricsView:
    """A `View` that keeps each step's metrics instead of showing them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def start(self, name: str, note: str = "") -> None:
        """Show nothing."""

    def step(self, step: int, steps: int, metrics: Mapping[str, float], deadlines: Deadlines) -> None:
        """Keep the metrics of a step."""
        self.steps.append(dict(metrics))

    def message(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Show nothing."""
