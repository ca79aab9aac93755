"""What asynchrony gains and costs: the tiny recipe at several asynchronous ratios, from the same warm start.

    python benchmarks/async_ratio.py [--seeds 5] [--steps 300] [--resume]

For each seed one supervised warm start, then reinforcement learning from it with alpha 0, 0.5, 1 and 2, one CPU thread a
process. So that synchronous training is given its best, its step is also timed with two threads in each phase, for fewer
steps: threads change results by rounding alone. The order of the settings rotates with the seed, so that a machine that is
slower for a while is so for all of them; seconds are medians over the seeds. It takes an hour and more; `--resume` goes on
where it was interrupted.
"""

import argparse
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev

from _common import ROOT, WHOLE_RUN, table, write_result
from _runs import Finished, run

RECIPE = ROOT / "recipes" / "tiny_arithmetic" / "config.yaml"
SETTINGS = {
    "sync": ("rollout.async_ratio=0",),
    "sync, 2 threads": ("rollout.async_ratio=0", "engine.threads=2", "learner.threads=2"),
    "alpha 0.5": ("rollout.async_ratio=0.5",),
    "alpha 1": ("rollout.async_ratio=1",),
    "alpha 2": ("rollout.async_ratio=2",),
}
TIMED_ONLY = {"sync, 2 threads": 60}  # steps
WARM_UP = 5  # steps left out of the times


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--runs", type=Path, default=Path("runs/async_ratio"))
    arguments.add_argument("--resume", action="store_true")
    options = arguments.parse_args()
    make = partial(run, runs=options.runs, resume=options.resume)
    found: dict[str, list[Finished]] = {name: [] for name in SETTINGS}
    for seed in range(options.seeds):
        warm = make("sft", RECIPE, f"warm-{seed}", f"seed={seed}")
        names = list(SETTINGS)
        for name in names[seed % len(names) :] + names[: seed % len(names)]:
            steps = min(TIMED_ONLY.get(name, options.steps), options.steps)
            overrides = (f"seed={seed}", f"steps={steps}", "sft=null", f"model.path={warm.checkpoint}")
            label = f"{name.replace(' ', '-').replace(',', '')}-{seed}"
            found[name].append(make("train", RECIPE, label, *overrides, *SETTINGS[name]))
            print(f"seed {seed}  {name:16}  {describe(found[name][-1])}", flush=True)
    figures = report(found)
    print(f"\nwritten to {write_result('async_ratio', figures, measures=WHOLE_RUN)}")


def step_seconds(finished: Finished) -> float:
    return median(finished.column("step/seconds")[WARM_UP:])


def describe(finished: Finished) -> str:
    return f"{step_seconds(finished):.3f} s a step, accuracy {finished.summary['accuracy_after']:.3f}"


def report(found: dict[str, list[Finished]]) -> dict[str, float]:
    rows, figures, heads = [], {}, list[str]()
    for name, finished in found.items():
        key = name.replace(" ", "_").replace(",", "").replace(".", "_")
        accuracies = [f.summary["accuracy_after"] for f in finished]
        numbers = {
            "step_seconds": median(map(step_seconds, finished)),
            "learner_waits_share": mean(mean(f.column("step/wait_groups_share")[WARM_UP:]) for f in finished),
            "age_mean": mean(mean(f.column("age/mean")[WARM_UP:]) for f in finished),
            "mismatch_kl": mean(mean(f.column("learner/mismatch_kl")[WARM_UP:]) for f in finished),
            "accuracy_before": mean(f.summary["accuracy_before"] for f in finished),
            "accuracy": mean(accuracies),
            "accuracy_lowest": min(accuracies),
            "accuracy_error": stdev(accuracies) / len(accuracies) ** 0.5 if len(accuracies) > 1 else 0.0,
        }
        if name in TIMED_ONLY:
            numbers = {key: value for key, value in numbers.items() if not key.startswith("accuracy")}
        heads = heads or list(numbers)
        rows.append([name, *(f"{value:.4f}" for value in numbers.values()), *[""] * (len(heads) - len(numbers))])
        figures |= {f"{key}_{measure}": value for measure, value in numbers.items()}
    print("\n" + table(["setting", *heads], rows))
    # Pairs of one seed ran within minutes of each other; their ratio is steadier than the ratio of the means.
    sync = min(("sync", "sync, 2 threads"), key=lambda name: median(map(step_seconds, found[name])))
    speedups = {
        name: median(step_seconds(s) / step_seconds(a) for s, a in zip(found[sync], found[name], strict=True))
        for name in SETTINGS
        if name.startswith("alpha")
    }
    best = max(speedups, key=lambda name: speedups[name])
    print(f"\n{best} is {speedups[best]:.2f} times as fast a step as {sync!r}")
    key = best.replace(" ", "_").replace(".", "_")
    figures["speedup_best_async_over_best_sync"] = speedups[best]
    figures["accuracy_best_async_minus_sync"] = figures[f"{key}_accuracy"] - figures["sync_accuracy"]
    return figures


if __name__ == "__main__":
    main()
