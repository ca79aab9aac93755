"""What a learner with less memory learns: the tiny recipe offloaded, with moments of 8 bits, and as adapters on 4 bits.

    pip install 'antiphon[bitsandbytes,peft]'
    python benchmarks/small_gpu.py [--seeds 3] [--jobs 2]

Each seed has one supervised warm start, from which all ways go on:

* `plain`: all weights, float32;
* `offloaded`: the same, with `learner.cpu_offload`;
* `moments`: the same, with `learner.optimizer.moments=8bit`;
* `adapters`: LoRA, with a learning rate for it;
* `nf4`: the same on a base of four bits, which engines have, too.

Figures are accuracies on the test problems. `difference` is the mean over the seeds of the accuracy minus that of `plain`, for
`nf4` of `adapters`; `slack` is half of Student's interval at 95 %, over pairs of one seed. `mismatch_kl` is the mean of
`learner/mismatch_kl`. It all ran on CPUs, so nothing here says what a GPU holds or how long it takes.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

from _common import ROOT, WHOLE_RUN, interval, table, write_result
from _runs import Finished, run

RECIPE = ROOT / "recipes" / "tiny_arithmetic" / "config.yaml"
# 0.9 million parameters in matrices of at most 512 rows have a rank of 32 and a rate that suits it.
ADAPTERS = ("learner.lora={rank: 32, alpha: 64}", "learner.optimizer.learning_rate=2e-3")
WAYS = {  # and what each is compared with
    "plain": ("plain", ()),
    "offloaded": ("plain", ("learner.cpu_offload=true",)),
    "moments": ("plain", ("learner.optimizer.moments=8bit",)),
    "adapters": ("plain", ADAPTERS),
    "nf4": ("adapters", (*ADAPTERS, "learner.lora.quantize=nf4")),
}
MEASURES = (
    *WHOLE_RUN,
    "antiphon.learning.adamw_8bit",
    "antiphon.learning.model.lora",
    "antiphon.learning.parallel.sharding",
)


def train(seed: int, runs: Path) -> dict[str, Finished]:
    """Train all ways of one seed; a run that is there already is taken as it is."""
    warm = run("sft", RECIPE, f"warm-{seed}", f"seed={seed}", runs=runs, resume=True)
    common = (f"seed={seed}", "sft=null", f"model.path={warm.checkpoint}")
    return {
        way: run("train", RECIPE, f"{way}-{seed}", *common, *changes, runs=runs, resume=True)
        for way, (_, changes) in WAYS.items()
    }


def main() -> None:
    """Train all, print a table, write the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--jobs", type=int, default=2, help="seeds at once; no figure is a time")
    arguments.add_argument("--runs", type=Path, default=Path("runs/small_gpu"))
    options = arguments.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        of_seeds = list(pool.map(lambda seed: train(seed, options.runs), range(options.seeds)))
    figures, rows = {"seeds": len(of_seeds)}, []
    for way, (other, _) in WAYS.items():
        reached = [found[way].summary["accuracy_after"] for found in of_seeds]
        pairs = [found[way].summary["accuracy_after"] - found[other].summary["accuracy_after"] for found in of_seeds]
        own = {
            "accuracy": mean(reached),
            "lowest_accuracy": min(reached),
            "mismatch_kl": mean(mean(found[way].column("learner/mismatch_kl")) for found in of_seeds),
        }
        if way != other:
            own |= {"difference": mean(pairs), "slack": interval(pairs)}
        figures |= {f"{way}_{name}": value for name, value in own.items()}
        cells = [f"{value:.3f}" for value in reached] + [f"{own['mismatch_kl']:.5f}", f"{mean(pairs):+.3f}"]
        rows.append([way, *cells, f"{interval(pairs):.3f}"])
    print(table(["way", *(f"seed {seed}" for seed in range(options.seeds)), "mismatch", "difference", "±"], rows))
    print("written:", write_result("small_gpu", figures, measures=MEASURES))


if __name__ == "__main__":
    main()
