"""The recipe `webshop`, seed by seed: success up and turns down, on wishes in shops that were never seen.

    python benchmarks/webshop.py [--seeds 5] [--control] [--resume]

Success (a reward of 1), mean reward and turns of a visit, on the test wishes, before reinforcement learning and after it;
sampled at temperature 1, as in training, greedily, and four times for each `unheard` wish, whose very words are in no training
shop. Intervals are Student's at 95 %, over seeds.

`--control` goes on from the same warm starts with `turn_gamma: 1`, so that only their limit says that visits should be short.

Draws `recipes/webshop/curve.png`: the visits that each step was trained on.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

import matplotlib
from _common import ROOT, WHOLE_RUN, interval, table, write_result
from _runs import Finished, run

from antiphon.core.config import add_import_folder, load
from antiphon.run.commands import evaluate_model
from antiphon.run.config import RunConfig

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MEASURES = (
    *WHOLE_RUN,
    "antiphon.algorithms",
    "antiphon_envs.webshop.environment",
    "antiphon_envs.webshop.reward",
)

UNHEARD = ("tasks.0.test.options={unheard: true}",)
CONFIG = ROOT / "recipes" / "webshop" / "config.yaml"
METRICS = ("success", "score", "turns")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--control", action="store_true", help="also without the discount")
    arguments.add_argument("--runs", type=Path, default=Path("runs/webshop"))
    arguments.add_argument("--resume", action="store_true", help="take runs that have ended as they are")
    options = arguments.parse_args()
    add_import_folder(CONFIG)
    finished, measured = [], []
    for seed in range(options.seeds):
        overrides = (f"seed={seed}", "checkpoint.every=100000")  # which keeps the model that the warm start came to
        run_ = run("train", CONFIG, f"seed-{seed}", *overrides, runs=options.runs, resume=options.resume)
        finished.append(run_)
        measured.append(measures(run_, seed))
        if options.control:
            start = (f"model.path={checkpoints(run_)[0].resolve()}", "sft=null", "algorithm.turn_gamma=1")
            without = run(
                "train", CONFIG, f"control-{seed}", *start, *overrides, runs=options.runs, resume=options.resume
            )
            after = chosen(without.summary["measures_after"])
            measured[-1] |= {f"control_{name}_after": value for name, value in after.items()}
            measured[-1]["turns_saved_by_discount"] = after["turns"] - measured[-1]["turns_after"]
        print(table([f"seed {seed}", ""], [[name, f"{value:.3f}"] for name, value in measured[-1].items()]), flush=True)
    figures = {f"seed_{seed}_{name}": value for seed, found in enumerate(measured) for name, value in found.items()}
    for name in measured[0]:
        values = [found[name] for found in measured]
        figures[name] = mean(values)
        figures[f"{name}_interval"] = interval(values)
    figures["longest_train_seconds"] = max(found["train_seconds"] for found in measured)
    print("\n" + table(["", ""], [[name, f"{value:.3f}"] for name, value in figures.items() if "seed" not in name]))
    draw(finished, CONFIG.parent / "curve.png")
    print(f"\nwritten to {write_result('webshop', figures, measures=MEASURES)}")


def measures(run_: Finished, seed: int) -> dict[str, float]:
    """The figures of one seed."""
    found = {"train_seconds": run_.summary["train_seconds"], "warm_start_seconds": run_.summary["warm_start_seconds"]}
    sampled = {when: chosen(run_.summary[f"measures_{when}"]) for when in ("before", "after")}
    config, unheard = (load(CONFIG, [f"seed={seed}", *more], model=RunConfig) for more in ((), UNHEARD))
    for when, checkpoint in zip(sampled, checkpoints(run_), strict=True):
        greedy = evaluate_model(str(checkpoint), config, samples=1, temperature=0.0, limit=0)
        strange = evaluate_model(str(checkpoint), unheard, samples=4, temperature=1.0, limit=0)
        found |= {f"{name}_{when}": value for name, value in sampled[when].items()}
        found |= {f"greedy_{name}_{when}": value for name, value in chosen(greedy["means"]).items()}
        found |= {f"unheard_{name}_{when}": value for name, value in chosen(strange["means"]).items()}
        found["unheard_prompts"] = strange["prompts"]
    for name in (kind + name for kind in ("", "greedy_", "unheard_") for name in METRICS):
        found[f"{name}_change"] = found[f"{name}_after"] - found[f"{name}_before"]
    return found


def chosen(means: Mapping[str, float]) -> dict[str, float]:
    """Of the means that an evaluation has found, those that are told."""
    return {name: means[f"webshop/{name}"] for name in METRICS}


def checkpoints(run_: Finished) -> tuple[Path, Path]:
    """The first, which is the warm start, and the last."""
    found = sorted((run_.directory / "checkpoints").iterdir())
    return found[0], found[-1]


def draw(finished: list[Finished], target: Path) -> None:
    """Success and turns of each step's visits: one thin line a seed, their smoothed mean thick."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), dpi=120)
    for axes, name, colour in zip(panels, ("success", "turns"), ("tab:blue", "tab:orange"), strict=True):
        curves = [run_.column(f"reward/part/webshop/{name}") for run_ in finished]
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.3, linewidth=0.8)
        means = [mean(values) for values in zip(*curves, strict=False)]
        smooth = [mean(means[max(0, i - 2) : i + 3]) for i in range(len(means))]
        axes.plot(range(1, len(smooth) + 1), smooth, color=colour, linewidth=2)
        axes.set(xlabel="training step", ylabel=f"{name} of the step's visits", ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    main()
