"""What bfloat16 costs in learning: recipes with engines and learner in float32, and in bfloat16.

    python benchmarks/low_precision.py [--jobs 2] [--arms float32 rollouts corrected]

Each recipe is trained with several seeds, which draw the model, the order of the prompts and all samples:

* `float32`: engine and learner in float32;
* `rollouts`: the engine in bfloat16;
* `corrected`: the same, with `algorithm.correction.level=token`;
* `bfloat16`: engine and learner in bfloat16, which takes a processor with instructions for it.

Figures are the accuracies on the test problems, and the mean of `learner/mismatch_kl`. `difference` is the mean over the seeds
of the accuracy minus that of float32; `low` and `high` bound it with a confidence of 95 %, by Student's t of the pairs.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

from _common import ROOT, WHOLE_RUN, table, write_result
from _runs import Finished, run

RECIPES = {  # and changes; paths are those of the repository's root
    "tiny": ("recipes/tiny_arithmetic/config.yaml",),
    "starter": (
        "recipes/starter/run.yaml",
        "tasks.0.prompts.path=recipes/starter/train.jsonl",
        "tasks.0.test.path=recipes/starter/test.jsonl",
    ),
}
LOW = "engine.dtype=bfloat16"
ARMS = {
    "float32": (),
    "rollouts": (LOW,),
    "corrected": (LOW, "algorithm.correction.level=token"),
    "bfloat16": (LOW, "learner.dtype=bfloat16"),
}
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of Student, by the number of pairs


def train(recipe: str, arm: str, seed: int, runs: Path) -> Finished:
    """Train one recipe; a run that is there already is taken as it is."""
    config, *changes = RECIPES[recipe]
    overrides = (f"seed={seed}", *changes, *ARMS[arm])
    return run("train", ROOT / config, f"{recipe}-{arm}-{seed}", *overrides, runs=runs, resume=True)


def main() -> None:
    """Train all, print a table, write the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=3, choices=sorted(T_95))
    arguments.add_argument("--jobs", type=int, default=2, help="runs at once; no figure is a time")
    arguments.add_argument("--runs", type=Path, default=Path("runs/low_precision"))
    arguments.add_argument("--arms", nargs="+", default=[*ARMS], choices=[*ARMS], help="float32 is one of them")
    options = arguments.parse_args()
    arms = ["float32", *(arm for arm in options.arms if arm != "float32")]
    cases = [(recipe, arm, seed) for recipe in RECIPES for seed in range(options.seeds) for arm in arms]
    with ThreadPoolExecutor(options.jobs) as pool:
        finished = dict(zip(cases, pool.map(lambda case: train(*case, options.runs), cases), strict=True))
    figures, rows = {}, []
    for recipe in RECIPES:
        accuracies = {
            arm: [finished[recipe, arm, seed].summary["accuracy_after"] for seed in range(options.seeds)]
            for arm in arms
        }
        for arm, values in accuracies.items():
            pairs = [value - plain for value, plain in zip(values, accuracies["float32"], strict=True)]
            slack = T_95[options.seeds] * stdev(pairs) / options.seeds**0.5
            mismatch = mean(
                mean(finished[recipe, arm, seed].column("learner/mismatch_kl")) for seed in range(options.seeds)
            )
            found = {"accuracy": mean(values), "lowest_accuracy": min(values), "mismatch_kl": mismatch}
            if arm != "float32":
                found |= {"difference": mean(pairs), "low": mean(pairs) - slack, "high": mean(pairs) + slack}
            figures |= {f"{recipe}_{arm}_{name}": value for name, value in found.items()}
            rows.append([recipe, arm, *(f"{value:.3f}" for value in values), f"{mismatch:.5f}", f"{mean(pairs):+.3f}"])
    uncorrected = [arm for arm in arms if arm in ("rollouts", "bfloat16")]
    if worst := [figures[f"{recipe}_{arm}_difference"] for recipe in RECIPES for arm in uncorrected]:
        figures["worst_accuracy_difference"] = min(worst)
    seeds = [f"seed {seed}" for seed in range(options.seeds)]
    print(table(["recipe", "dtypes", *seeds, "mismatch", "difference"], rows))
    print("written:", write_result("low_precision", figures, measures=WHOLE_RUN))


if __name__ == "__main__":
    main()
