"""Two games on boards, seed by seed: what is learned at two asynchronous ratios, by two advantages, and for the other game.

    python benchmarks/grid_worlds.py [--seeds 3] [--resume]

One supervised warm start on both games. From it, for each seed, reinforcement learning of each game with alpha 0 and 2, and of
Sokoban with GiGPO; and what FrozenLake with alpha 2 has led to is tried on Sokoban. *Success* is the share of 200 boards that
are solved, with layouts that no training board has; *effective* is the share of moves there that change the board. Intervals
are Student's over seeds, 95 %; `gain_over_boards` is the least that a seed gains, by its own interval over boards.

Draws `recipes/grid_worlds/curve.png`. `--resume` goes on where it was interrupted.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import matplotlib
from _common import ROOT, table, write_result
from _runs import Finished, run

from antiphon.build import evaluate_model
from antiphon.config import import_folder, load
from antiphon.run_config import RunConfig

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RECIPE = ROOT / "recipes" / "grid_worlds"
TITLES = {"frozen_lake": "FrozenLake, 5 × 5", "sokoban": "Sokoban, 6 × 6"}
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # quantiles of 0.975 for so many seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One of the runs of each seed."""

    game: str
    label: str
    overrides: tuple[str, ...] = ()


KINDS = {
    "frozen_lake_alpha_0": Kind(game="frozen_lake", label="α = 0", overrides=("rollout.async_ratio=0",)),
    "frozen_lake_alpha_2": Kind(game="frozen_lake", label="α = 2"),
    "sokoban_alpha_0": Kind(game="sokoban", label="α = 0", overrides=("rollout.async_ratio=0",)),
    "sokoban_alpha_2": Kind(game="sokoban", label="α = 2"),
    "sokoban_gigpo": Kind(game="sokoban", label="α = 2, GiGPO", overrides=("algorithm.recipe=gigpo",)),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=3, choices=sorted(STUDENT))
    arguments.add_argument("--runs", type=Path, default=Path("runs/grid_worlds"))
    arguments.add_argument("--resume", action="store_true")
    options = arguments.parse_args()
    make = partial(run, runs=options.runs, resume=options.resume)
    found: dict[str, list[Finished]] = {name: [] for name in KINDS}
    warm = make("sft", RECIPE / "frozen_lake.yaml", "warm")
    for seed in range(options.seeds):
        for name, kind in KINDS.items():
            overrides = (f"seed={seed}", "sft=null", f"model.path={warm.checkpoint}", *kind.overrides)
            found[name].append(make("train", RECIPE / f"{kind.game}.yaml", f"{name}-{seed}", *overrides))
            print(f"seed {seed}  {name:20}  {describe(found[name][-1])}", flush=True)
    draw(found, RECIPE / "curve.png")
    figures = report(found) | transfer(found["frozen_lake_alpha_2"], found["sokoban_alpha_2"])
    print(f"\nwritten to {write_result('grid_worlds', figures)}")


def describe(finished: Finished) -> str:
    summary = finished.summary
    return f"{summary['accuracy_before']:.3f} to {summary['accuracy_after']:.3f} in {summary['train_seconds']:.0f} s"


def report(found: Mapping[str, Sequence[Finished]]) -> dict[str, float]:
    """The figures; prints them as tables."""
    figures, rows = dict[str, float](), []
    for name, finished in found.items():
        measured = measures(KINDS[name].game, finished)
        rows.append([name, *(f"{mean(values):.3f} ± {margin(values):.3f}" for values in measured.values())])
        for measure, values in measured.items():
            figures |= figures_of(f"{name}_{measure}", values)
        figures[f"{name}_gain_over_boards"] = min(each.summary["gain_interval"][0] for each in finished)
    print("\n" + table(["", *measured], rows) + "\n")
    differences = {
        "sokoban_gigpo_minus_grpo": ("sokoban_gigpo", "sokoban_alpha_2"),
        "frozen_lake_alpha_2_minus_0": ("frozen_lake_alpha_2", "frozen_lake_alpha_0"),
        "sokoban_alpha_2_minus_0": ("sokoban_alpha_2", "sokoban_alpha_0"),
    }
    rows = []
    for name, (one, other) in differences.items():
        ours, theirs = (measures(KINDS[each].game, found[each]) for each in (one, other))
        for measure in ("success_before", "success_after", "reward"):
            values = [a - b for a, b in zip(ours[measure], theirs[measure], strict=True)]
            figures |= figures_of(f"{name}_{measure}", values)
            rows.append([f"{name}, {measure}", f"{mean(values):+.3f} ± {margin(values):.3f}"])
    print(table(["difference", ""], rows))
    return figures


def transfer(lake: Sequence[Finished], sokoban: Sequence[Finished]) -> dict[str, float]:
    """What training on FrozenLake did for success on Sokoban, without any training there: the mean over seeds of what is gained
    over the warm start, on the same boards."""
    import_folder(RECIPE / "sokoban.yaml")
    figures, after = dict[str, float](), []
    for seed, each in enumerate(lake):
        config = load(RECIPE / "sokoban.yaml", [f"seed={seed}"], model=RunConfig)
        temperature = config.evaluation.temperature
        after.append(evaluate_model(str(each.checkpoint), config, samples=1, temperature=temperature, limit=0))
    for measure, key, before in (
        ("success", "accuracy", [each.summary["accuracy_before"] for each in sokoban]),
        ("effective", "sokoban/effective", [each.summary["measures_before"]["sokoban/effective"] for each in sokoban]),
    ):
        values = [each[key] for each in after]
        gains = [a - b for a, b in zip(values, before, strict=True)]
        figures |= figures_of(f"transfer_{measure}", values) | figures_of(f"transfer_{measure}_gain", gains)
        print(f"transfer to Sokoban, {measure}: {mean(values):.3f}, gain {mean(gains):+.3f} ± {margin(gains):.3f}")
    return figures


def measures(game: str, finished: Sequence[Finished]) -> dict[str, list[float]]:
    """What is measured of each seed; `reward` is the mean of all samples of the run, at temperature 1."""
    effective = f"{game}/effective"
    return {
        "success_before": [each.summary["accuracy_before"] for each in finished],
        "success_after": [each.summary["accuracy_after"] for each in finished],
        "effective_before": [each.summary["measures_before"][effective] for each in finished],
        "effective_after": [each.summary["measures_after"][effective] for each in finished],
        "reward": [mean(each.column("reward/mean")) for each in finished],
        "seconds": [each.summary["train_seconds"] for each in finished],
    }


def figures_of(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        name: mean(values),
        f"{name}_low": mean(values) - margin(values),
        f"{name}_high": mean(values) + margin(values),
    }


def margin(values: Sequence[float]) -> float:
    """Half of the interval."""
    return STUDENT[len(values)] * stdev(values) / len(values) ** 0.5


def draw(found: Mapping[str, Sequence[Finished]], target: Path) -> None:
    """By game, the success and the share of effective moves of each step's samples: seeds thin, their mean thick."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 5.4), dpi=110, sharex=True, sharey="row")
    for axes, (game, title) in zip(panels.T, TITLES.items(), strict=True):
        kinds = [name for name, kind in KINDS.items() if kind.game == game]
        for panel, column in zip(axes, ("reward/mean", f"reward/part/{game}/effective"), strict=True):
            for number, name in enumerate(kinds):
                curves = [smooth(each.column(column)) for each in found[name]]
                for curve in curves:
                    panel.plot(curve, color=f"C{number}", alpha=0.3, linewidth=0.6)
                means = [mean(values) for values in zip(*curves, strict=True)]
                panel.plot(means, color=f"C{number}", linewidth=1.8, label=KINDS[name].label)
            panel.grid(alpha=0.3)
        axes[0].set(title=title)
        axes[0].legend(loc="lower right", fontsize=8)
        axes[1].set(xlabel="training step")
    panels[0, 0].set(ylabel="success", ylim=(0, 1))
    panels[1, 0].set(ylabel="effective moves")
    figure.tight_layout()
    figure.savefig(target)


def smooth(curve: Sequence[float]) -> list[float]:
    """Means over five steps."""
    return [mean(curve[max(0, i - 2) : i + 3]) for i in range(len(curve))]


if __name__ == "__main__":
    main()
