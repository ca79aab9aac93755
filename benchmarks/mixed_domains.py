"""Three domains with three rewards at once, seed by seed: their curves, their proportions, and what waits for rewards.

    python benchmarks/mixed_domains.py [--seeds 3] [--resume]

A step *waits for rewards* from the moment at which all tokens of its batch are there, and the step before has been published,
until the last of its scores is there. `held_up_by_rewards` is for how long the engine has nothing to do meanwhile: only
that delays a run. `idle` is the share of the time in which neither it nor the learner has, whatever the reason. The proportions
are counted in the order in which groups were admitted: `furthest` is how far, in groups, any window is from its exact share.

Draws `recipes/mixed_domains/curve.png` (all seeds) and `trace.png` (some steps of the first).
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import matplotlib
from _common import ROOT, WHOLE_RUN, table, write_result
from _runs import Finished, run

from antiphon.record.timeline import union_length

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MEASURES = (*WHOLE_RUN, "antiphon.tasks.grading", "antiphon.tasks.mixture", "antiphon.tasks.rewards")

CONFIG = ROOT / "recipes" / "mixed_domains" / "config.yaml"
SHARES = {"math": 0.4, "code": 0.3, "instruction": 0.3}
SHOWN = 4  # steps in the trace


@dataclass(slots=True)
class Trace:
    """What happened when, by attempt; seconds on the run's clock."""

    placed: dict[str, float] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    scored: dict[str, float] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)  # tasks, in order
    task: dict[str, str] = field(default_factory=dict)  # of a group
    steps: list[tuple[float, float, list[str]]] = field(default_factory=list)  # taken, published, groups

    @classmethod
    def read(cls, lines: Iterable[str]) -> "Trace":
        """Of `events.jsonl`."""
        trace, taken, groups = cls(), 0.0, list[str]()
        for line in lines:
            what: dict[str, Any] = json.loads(line)
            attempt = str(what.get("request", what.get("attempt"))).partition("/")[0]
            match what["event"]:
                case "admit":
                    task = what["prompt"].partition("/")[0]
                    trace.task[str(what["group"])] = task
                    trace.admitted.append(task)
                case "place":
                    trace.placed[attempt] = what["t"]
                case "served":
                    trace.served[attempt] = what["t"]
                case "attempt" if what["status"] == "finished":
                    trace.scored[attempt] = what["t"]
                case "take":
                    taken, groups = what["t"], [str(group) for group in what["groups"]]
                case "publish":
                    trace.steps.append((taken, what["t"], groups))
        return trace

    def waits(self) -> list[tuple[float, float]]:
        """When each step waited for rewards alone; the first, which has none before it, left out."""
        served, scored = (self._last(when) for when in (self.served, self.scored))
        spans = [
            (max(free, *(served[group] for group in groups)), max(scored[group] for group in groups))
            for (_, free, _), (_, _, groups) in zip(self.steps, self.steps[1:], strict=False)
        ]
        return [(ready, judged) for ready, judged in spans if judged > ready]

    def _last(self, when: dict[str, float]) -> dict[str, float]:
        """Of each group, the last of its attempts that were scored."""
        last: dict[str, float] = {}
        for attempt, second in when.items():
            group = attempt.partition(".")[0]
            if attempt in self.scored:
                last[group] = max(last.get(group, 0.0), second)
        return last

    def busy(self, others: Sequence[tuple[float, float]] = ()) -> float:
        """Share of the time in which something is sampled or trained on, or one of `others` goes on."""
        since, until = self.steps[0][1], self.steps[-1][1]
        spans = [(placed, self.served[attempt]) for attempt, placed in self.placed.items() if attempt in self.served]
        spans += [*((taken, published) for taken, published, _ in self.steps), *others]
        return union_length((max(a, since), min(b, until)) for a, b in spans if b > since and a < until) / (
            until - since
        )

    def grading(self, task: str) -> list[float]:
        """Seconds from the last token of each attempt to its score."""
        return [
            self.scored[attempt] - served
            for attempt, served in self.served.items()
            if attempt in self.scored and self.task[attempt.partition(".")[0]] == task
        ]

    def furthest(self) -> float:
        """How far any window is from its share, in groups."""
        worst = 0.0
        for task, share in SHARES.items():
            gap, lowest, highest = 0.0, 0.0, 0.0
            for each in self.admitted:
                gap += (each == task) - share
                lowest, highest = min(lowest, gap), max(highest, gap)
            worst = max(worst, highest - lowest)  # the window between the two
        return worst


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--runs", type=Path, default=Path("runs/mixed_domains"))
    arguments.add_argument("--resume", action="store_true", help="take runs that have ended as they are")
    options = arguments.parse_args()
    finished, traces, figures, rows = [], [], dict[str, float](), []
    for seed in range(options.seeds):
        overrides = (f"seed={seed}", "record.events=true")
        run_ = run("train", CONFIG, f"seed-{seed}", *overrides, runs=options.runs, resume=options.resume)
        with (run_.directory / "events.jsonl").open() as lines:
            trace = Trace.read(lines)
        finished.append(run_)
        traces.append(trace)
        measured = measure(run_, trace)
        figures |= {f"seed_{seed}_{name}": value for name, value in measured.items()}
        rows.append([f"seed {seed}", *(f"{value:.3f}" for value in measured.values())])
        print(table(["", *measured], rows[-1:]), flush=True)
    print("\n" + table(["", *measured], rows))
    for name in ("share_of_time_waiting_for_rewards", "held_up_by_rewards", "idle", "furthest"):
        figures[name] = max(figures[f"seed_{seed}_{name}"] for seed in range(options.seeds))
    draw_curves(finished, CONFIG.parent / "curve.png")
    draw_trace(traces[0], CONFIG.parent / "trace.png")
    print(f"\nwritten to {write_result('mixed_domains', figures, measures=MEASURES)}")


def measure(run_: Finished, trace: Trace) -> dict[str, float]:
    """The figures of one seed."""
    waits = trace.waits()
    busy, lengths = trace.busy(), [judged - ready for ready, judged in waits]
    figures = {
        "share_of_time_waiting_for_rewards": sum(lengths) / (trace.steps[-1][1] - trace.steps[0][1]),
        "held_up_by_rewards": trace.busy(waits) - busy,
        "idle": 1 - busy,
        "steps_that_waited_for_rewards": sum(length > 0.01 for length in lengths) / len(trace.steps[1:]),
        "furthest": trace.furthest(),
        "train_seconds": run_.summary["train_seconds"],
    }
    counted = Counter(trace.admitted)
    for task in SHARES:
        seconds, accuracies = trace.grading(task), run_.summary["tasks"][task]
        figures |= {f"{task}_{name}": accuracies[name] for name in ("accuracy_before", "accuracy_after")}
        figures[f"{task}_share"] = counted[task] / len(trace.admitted)
        figures[f"{task}_grading_ms"] = 1e3 * median(seconds)
        figures[f"{task}_grading_p99_ms"] = 1e3 * quantiles(seconds, n=100)[-1]
    return figures


def draw_curves(finished: list[Finished], target: Path) -> None:
    """The mean reward of each step by domain: one thin line a seed, their mean thick."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2), dpi=120)
    for number, task in enumerate(SHARES):
        curves = [run_.column(f"reward/task/{task}") for run_ in finished]
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=f"C{number}", alpha=0.2, linewidth=0.6)
        means = [mean(values) for values in zip(*curves, strict=False)]
        smooth = [mean(means[max(0, i - 4) : i + 5]) for i in range(len(means))]
        axes.plot(range(1, len(smooth) + 1), smooth, color=f"C{number}", linewidth=2, label=task)
    axes.set(xlabel="training step", ylabel="mean reward of the step's samples", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target)


def draw_trace(trace: Trace, target: Path) -> None:
    """Attempts that are sampled and that are judged, by domain, over some steps in the middle of the run."""
    middle = len(trace.steps) // 2
    since, until = trace.steps[middle][0], trace.steps[middle + SHOWN - 1][1]
    points = [since + (until - since) * n / 600 for n in range(601)]
    figure, axes = plt.subplots(figsize=(9, 3.4), dpi=120)

    def task_of(attempt: str) -> str:
        return trace.task.get(attempt.partition(".")[0], "")  # evaluations have no group

    def alive(begin: dict[str, float], end: dict[str, float], tasks: Iterable[str]) -> list[int]:
        spans = [
            (begin[attempt], end[attempt])
            for attempt in begin.keys() & end.keys()
            if task_of(attempt) in tasks and end[attempt] > since and begin[attempt] < until
        ]
        return [sum(first <= point < last for first, last in spans) for point in points]

    seconds = [point - since for point in points]
    sampled = alive(trace.placed, trace.served, SHARES)
    axes.fill_between(seconds, sampled, color="lightgray", label="sampled")
    for task in SHARES:
        axes.plot(seconds, alive(trace.served, trace.scored, (task,)), label=f"judged: {task}", linewidth=1)
    for number, (taken, published, _) in enumerate(trace.steps[middle : middle + SHOWN]):
        label = "trained on" if number == 0 else None
        axes.axvspan(taken - since, published - since, ymin=0.94, color="tab:red", alpha=0.6, label=label)
    axes.set(xlabel="seconds", ylabel="attempts", xlim=(0, until - since))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    main()
