"""What the loss of an engine costs: the tiny recipe on two engines, undisturbed, and with one of them killed in mid-run.

    python benchmarks/engine_loss.py [--pairs 3] [--steps 60]

One warm start; then pairs of runs, undisturbed and disturbed, each pair with a seed of its own, minutes apart. Counts are sums
over the pairs; of seconds and accuracies there are medians, least and most, since a pair differs by as much without any loss.
Redundant siblings, extra groups, a group filter and updates in flight are on, and nothing replaces the engine. The events of
both runs are checked by the checker of the simulation: no attempt lost or counted twice, ages and live groups within bounds.
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import psutil
from _common import ROOT, WHOLE_RUN, table, write_result
from _runs import Finished, run

from antiphon.core.config import load
from antiphon.run.config import RunConfig
from antiphon.simulate.invariants import InvariantChecker

RECIPE = ROOT / "recipes" / "tiny_arithmetic" / "config.yaml"
SPREAD = ("train_seconds", "accuracy")
SETTINGS = (
    "engine.replicas=2",
    "engine.slots=96",
    "rollout.redundancy=2",
    "rollout.extra_groups=8",
    "rollout.order=ready",
    "rollout.filter=spread",
    "rollout.async_ratio=2",
    "rollout.on_update=keep",
    "rollout.engine_restarts=0",
    "record.events=true",
    "evaluation.minimum_accuracy=0",
    "sft=null",
)


def main() -> None:
    """All pairs; print the table, write the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--pairs", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--runs", type=Path, default=Path("runs/engine_loss"))
    options = arguments.parse_args()
    warm = run("sft", RECIPE, "warm", runs=options.runs, resume=True)
    common = (*SETTINGS, f"steps={options.steps}", f"model.path={warm.checkpoint}")
    found: dict[str, list[dict[str, float]]] = {"undisturbed": [], "disturbed": []}
    for seed in range(options.pairs):
        settings = (*common, f"seed={seed}")
        runs = {
            "undisturbed": run("train", RECIPE, "undisturbed", *settings, runs=options.runs),
            "disturbed": run_and_kill(settings, options.runs, after=options.steps // 3),
        }
        for name, finished in runs.items():
            found[name].append(describe(finished, options.steps))
            print(seed, name, *(f"{measure} {value:g}" for measure, value in found[name][-1].items()), flush=True)
    figures = {"pairs": float(options.pairs), **figures_of(found)}
    print(table(["figure", ""], [[name, f"{value:g}"] for name, value in figures.items()]))
    print("written:", write_result("engine_loss", figures, measures=WHOLE_RUN))


def figures_of(found: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Sums of what is counted; median, least and most of the rest, and of the ratios of seconds within the pairs."""
    figures: dict[str, float] = {}
    for name, runs in found.items():
        for measure in runs[0]:
            values = [each[measure] for each in runs]
            key = f"{name}_{measure}"
            if measure in SPREAD:
                figures |= {key: median(values), f"{key}_least": min(values), f"{key}_most": max(values)}
            else:
                figures[key] = sum(values)
    seconds = [[each["train_seconds"] for each in found[name]] for name in ("disturbed", "undisturbed")]
    ratios = [disturbed / undisturbed for disturbed, undisturbed in zip(*seconds, strict=True)]
    return figures | {
        "seconds_ratio": median(ratios),
        "seconds_ratio_least": min(ratios),
        "seconds_ratio_most": max(ratios),
    }


def run_and_kill(settings: tuple[str, ...], runs: Path, after: int) -> Finished:
    """A run whose second engine is killed once so many steps are done."""
    command = [sys.executable, "-m", "antiphon", "train", str(RECIPE), "--overwrite", "name=disturbed"]
    command += [f"record.directory={runs}", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.split("/")[0].split() == ["step", str(after)]:
                engine_process(process.pid).kill()
            if "engines left" in line:
                print(line.strip())
    if process.returncode:
        sys.exit(f"the disturbed run ended with {process.returncode}")
    return Finished(runs / "disturbed")


def engine_process(run_pid: int) -> psutil.Process:
    """The worker that writes the second engine's log."""
    for child in psutil.Process(run_pid).children(recursive=True):
        if os.readlink(f"/proc/{child.pid}/fd/1").endswith("engine-1.log"):
            return child
    sys.exit("no process of the second engine was found")


def describe(finished: Finished, steps: int) -> dict[str, float]:
    """Count the ends of attempts in a run that passes the checker."""
    checker = InvariantChecker(load(finished.directory / "config.yaml", model=RunConfig).rollout)
    with (finished.directory / "events.jsonl").open() as lines:
        checker.check(lines)
    checker.check_end(steps)
    ends = Counter(checker.status.values())
    return {
        "steps": finished.summary["steps"],
        "versions": finished.summary["versions"],
        "trained": ends["trained"],
        "filtered": ends["filtered"],
        "failed": ends["failed"],
        "engines_lost": len(checker.lost),
        "tokens_requeued": finished.column("tokens/requeued")[-1],
        "train_seconds": finished.summary["train_seconds"],
        "accuracy": finished.summary["accuracy_after"],
    }


if __name__ == "__main__":
    main()
