"""The tiny recipe on processes and on Ray: the same learning, the same books, and what Ray costs.

    python benchmarks/clusters.py [--rounds 3]

Two engines and a learner on this machine, as local processes and as actors of a Ray that is started for the run, with weights
through shared memory or through Ray's object store; round by round, each with a seed of its own. `around` is what a run
takes beside training: its start, the evaluations before and after, its end. The books are the ledger's: attempts that were
trained on, and promises that were broken. Then a deterministic run of some steps on each: their weights must be the same, byte
for byte.
"""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median

from _common import ROOT, WHOLE_RUN, table, write_result
from _runs import run

from antiphon.inspect.audit import audit

MEASURES = (*WHOLE_RUN, "antiphon.cluster")

RECIPE = ROOT / "recipes" / "tiny_arithmetic" / "config.yaml"
SETTINGS = ("engine.replicas=2", "engine.slots=96", "evaluation.minimum_accuracy=0")
WAYS = {
    "local": (),
    "ray": ("cluster.kind=ray",),
    "ray_object_store": ("cluster.kind=ray", "weights.channel=object_store"),
}
DETERMINISTIC = ("rollout.deterministic=true", "steps=10", "sft.steps=50")


def main() -> None:
    """All runs; print the table, write the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--runs", type=Path, default=Path("runs/clusters"))
    options = arguments.parse_args()
    found = rounds(WAYS, options.rounds, options.runs)
    whole = {
        way: run("train", RECIPE, f"same-{way}", *SETTINGS, *DETERMINISTIC, *WAYS[way], runs=options.runs)
        for way in WAYS
    }
    weights = {(finished.checkpoint / "model.safetensors").read_bytes() for finished in whole.values()}
    figures = {f"{way}_{name}": fmean(values) for way, each in found.items() for name, values in each.items()}
    for way in WAYS.keys() - {"local"}:
        pairs = zip(found[way]["step_seconds"], found["local"]["step_seconds"], strict=True)
        figures[f"{way}_step_ratio"] = median(there / here for there, here in pairs)
    rows = [[way, *(f"{fmean(values):.4g}" for values in each.values())] for way, each in found.items()]
    print(table(["cluster", *found["local"]], rows))
    print("deterministic runs end with the same weights" if len(weights) == 1 else "THE WEIGHTS DIFFER")
    print("written:", write_result("clusters", figures | {"same_weights": float(len(weights) == 1)}, measures=MEASURES))


def rounds(ways: Mapping[str, tuple[str, ...]], count: int, runs: Path) -> dict[str, dict[str, list[float]]]:
    """What each way, by its overrides, came to in each round: one after another, with a seed a round."""
    found: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    for number in range(count):
        for way, overrides in ways.items():
            for name, value in measured(f"{way}-{number}", (*overrides, f"seed={number}"), runs).items():
                found[way].setdefault(name, []).append(value)
            print(number, way, {name: values[-1] for name, values in found[way].items()}, flush=True)
    return found


def measured(name: str, overrides: tuple[str, ...], runs: Path) -> dict[str, float]:
    """What a run came to."""
    began = time.perf_counter()
    finished = run("train", RECIPE, name, *SETTINGS, *overrides, runs=runs)
    seconds = time.perf_counter() - began
    books = audit(finished.directory)
    return {
        "accuracy_before": finished.summary["accuracy_before"],
        "accuracy_after": finished.summary["accuracy_after"],
        "step_seconds": median(finished.column("step/seconds")),
        "train_seconds": finished.summary["train_seconds"],
        "around_seconds": seconds - finished.summary["train_seconds"],
        "trained": float(sum(counts.get("trained", 0) for counts in books.balance.values())),
        "violations": float(len(books.violations)),
    }


if __name__ == "__main__":
    main()
