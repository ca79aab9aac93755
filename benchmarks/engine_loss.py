"""What the loss of an engine costs: the tiny recipe on two engines, undisturbed, and with one of them killed in mid-run.

    python benchmarks/engine_loss.py [--steps 60]

Redundant siblings, extra groups, a group filter and updates in flight are on, and nothing replaces the engine. The events of
both runs are checked by the books of the simulation: no attempt lost or counted twice, ages and live groups within bounds.
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
from _common import ROOT, WHOLE_RUN, table, write_result
from _runs import Finished, run

from antiphon.config import load
from antiphon.run_config import RunConfig
from antiphon.simulate.chaos import Books

RECIPE = ROOT / "recipes" / "tiny_arithmetic" / "config.yaml"
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
    """Both runs; print the table, write the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--runs", type=Path, default=Path("runs/engine_loss"))
    options = arguments.parse_args()
    warm = run("sft", RECIPE, "warm", runs=options.runs)
    settings = (*SETTINGS, f"steps={options.steps}", f"model.path={warm.checkpoint}")
    undisturbed = run("train", RECIPE, "undisturbed", *settings, runs=options.runs)
    disturbed = run_and_kill(settings, options.runs, after=options.steps // 3)
    figures: dict[str, float] = {}
    rows = []
    for name, finished in {"undisturbed": undisturbed, "disturbed": disturbed}.items():
        found = describe(finished, options.steps)
        figures |= {f"{name}_{measure}": value for measure, value in found.items()}
        rows.append([name, *(f"{value:g}" for value in found.values())])
    print(table(["run", *found], rows))
    print("written:", write_result("engine_loss", figures, measures=WHOLE_RUN))


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
    """Counts of a run whose books close."""
    books = Books(load(finished.directory / "config.yaml", model=RunConfig).rollout)
    with (finished.directory / "events.jsonl").open() as lines:
        books.read(lines)
    books.close(steps)
    ends = Counter(books.status.values())
    return {
        "steps": finished.summary["steps"],
        "versions": finished.summary["versions"],
        "trained": ends["trained"],
        "filtered": ends["filtered"],
        "failed": ends["failed"],
        "engines_lost": len(books.gone),
        "tokens_requeued": finished.column("tokens/requeued")[-1],
        "train_seconds": finished.summary["train_seconds"],
        "accuracy": finished.summary["accuracy_after"],
    }


if __name__ == "__main__":
    main()
