"""Run a recipe to its end, seed by seed, and draw its curve.

    python benchmarks/recipe.py tiny_arithmetic --seeds 3 --control
    python benchmarks/recipe.py smollm2_arithmetic
    python benchmarks/recipe.py smollm2_arithmetic --vllm envs/vllm/bin/python

`--control` then spends the time that reinforcement learning took on more supervised fine-tuning instead. `--vllm` has vLLM
generate, from an environment of its own. Mismatch is the mean of k3 of KL(engine ‖ learner) over the tokens of a step, before
any update of it: of tokens that were sampled under older weights that is what their age makes, too.
"""

import argparse
from pathlib import Path
from statistics import mean, median

import matplotlib
from _common import ROOT, WHOLE_RUN, table, write_result
from _runs import Finished, run

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("recipe", choices=sorted(path.parent.name for path in ROOT.glob("recipes/*/config.yaml")))
    arguments.add_argument("--seeds", type=int, default=1)
    arguments.add_argument("--control", action="store_true")
    arguments.add_argument("--vllm", default="", help="the interpreter that has vLLM")
    arguments.add_argument("--runs", type=Path, default=Path("runs/recipe"))
    options = arguments.parse_args()
    config = ROOT / "recipes" / options.recipe / "config.yaml"
    finished, figures, rows = [], {}, []
    name = f"{options.recipe}_vllm" if options.vllm else options.recipe
    engine = ("engine.kind=vllm", f"engine.python={options.vllm}", "rollout.timeout=1800") if options.vllm else ()
    for seed in range(options.seeds):
        run_ = run("train", config, f"{name}-{seed}", f"seed={seed}", *engine, runs=options.runs)
        finished.append(run_)
        measures = {key: run_.summary[key] for key in ("accuracy_before", "accuracy_after", "train_seconds", "steps")}
        low, high = run_.summary["gain_interval"]
        mismatch = run_.column("learner/mismatch_kl")
        measures |= {"mismatch_kl": mean(mismatch), "mismatch_kl_most": max(mismatch)}
        measures |= {"gain_low": low, "gain_high": high, "test_prompts": run_.summary["test_prompts"]}
        if options.control:
            measures["accuracy_control"] = control(config, run_, seed, options.runs).summary["accuracy_after"]
        figures |= {f"seed_{seed}_{key}": value for key, value in measures.items()}
        rows.append([f"seed {seed}", *(f"{value:.3f}" for value in measures.values())])
        print(table(["", *measures], rows[-1:]), flush=True)
    print("\n" + table(["", *measures], rows))
    figures["lowest_accuracy_after"] = min(r.summary["accuracy_after"] for r in finished)
    figures["lowest_gain"] = min(r.summary["accuracy_after"] - r.summary["accuracy_before"] for r in finished)
    figures["longest_train_seconds"] = max(r.summary["train_seconds"] for r in finished)
    draw(finished, ROOT / "recipes" / options.recipe / ("curve_vllm.png" if options.vllm else "curve.png"))
    print(f"\nwritten to {write_result(f'recipe_{name}', figures, measures=WHOLE_RUN)}")


def control(config: Path, trained: Finished, seed: int, runs: Path) -> Finished:
    """Supervised fine-tuning alone, for as many steps as fit into the whole of the other run's training time."""
    step = median(trained.column("sft/seconds"))
    steps = int(trained.summary["train_seconds"] / step)
    overrides = (f"seed={seed}", f"sft.steps={steps}", "sft.stop_accuracy=0", "sft.optimizer.schedule=linear")
    return run("sft", config, f"control-{seed}", *overrides, runs=runs)


def draw(finished: list[Finished], target: Path) -> None:
    """The mean reward of each step, one thin line a seed, their mean thick."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2), dpi=120)
    curves = [run_.column("reward/mean") for run_ in finished]
    for curve in curves:
        axes.plot(range(1, len(curve) + 1), curve, color="tab:blue", alpha=0.3, linewidth=0.8)
    means = [mean(values) for values in zip(*curves, strict=False)]
    smooth = [mean(means[max(0, i - 4) : i + 5]) for i in range(len(means))]
    axes.plot(range(1, len(smooth) + 1), smooth, color="tab:blue", linewidth=2)
    axes.set(xlabel="training step", ylabel="mean reward of the step's samples", ylim=(0, 1))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    main()
