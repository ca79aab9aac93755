"""Two games on boards, seed by seed: what is learned at two asynchronous ratios, by two advantages, and for the other game.

    python benchmarks/grid_worlds.py [--seeds 3] [--resume]

One supervised warm start on both games. From it, for each seed, reinforcement learning of each game with alpha 0 and 2, and of
Sokoban with GiGPO; and what FrozenLake with alpha 2 has led to is tried on Sokoban. *Success* is the share of attempts that
solve their board, 8 at each of 200 boards with layouts that no training board has; *effective* is the share of moves there that
change the board. Intervals are 95 %: before training over boards, otherwise Student's over seeds.

Draws `recipes/grid_worlds/curve.png`. `--resume` goes on where it was interrupted.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib
from _common import ROOT, WHOLE_RUN, table, write_result
from _runs import Finished, run

from antiphon.core.config import add_import_folder, load
from antiphon.run.commands import evaluate_model
from antiphon.run.config import RunConfig

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MEASURES = (
    *WHOLE_RUN,
    "antiphon.algorithms",
    "antiphon.tasks.environments.frozen_lake",
    "antiphon_envs.sokoban.environment",
)

RECIPE = ROOT / "recipes" / "grid_worlds"
TITLES = {"frozen_lake": "FrozenLake, 5 × 5", "sokoban": "Sokoban, 6 × 6"}
ATTEMPTS = 8  # at each board
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
    print(f"\nwritten to {write_result('grid_worlds', report(warm, found), measures=MEASURES)}")


def describe(finished: Finished) -> str:
    summary = finished.summary
    return f"{summary['accuracy_before']:.3f} to {summary['accuracy_after']:.3f} in {summary['train_seconds']:.0f} s"


def tried(finished: Finished, game: str, seed: int = 0) -> dict[str, Any]:
    """How the model that a run has ended with does at a game."""
    path = RECIPE / f"{game}.yaml"
    add_import_folder(path)
    config = load(path, [f"seed={seed}"], model=RunConfig)
    temperature = config.evaluation.temperature
    found = evaluate_model(str(finished.checkpoint), config, samples=ATTEMPTS, temperature=temperature, limit=0)
    return found | {"effective": found["means"][f"{game}/effective"]}


def report(warm: Finished, found: Mapping[str, Sequence[Finished]]) -> dict[str, float]:
    """The figures; prints them as a table."""
    figures, reached = dict[str, float](), dict[str, list[float]]()
    before = {game: tried(warm, game) for game in TITLES}
    for game, measured in before.items():
        low, high = measured["accuracy, 95 % interval"]
        figures |= {f"{game}_before": measured["accuracy"], f"{game}_before_low": low, f"{game}_before_high": high}
        figures[f"{game}_before_effective"] = measured["effective"]
    groups = {name: (kind.game, found[name]) for name, kind in KINDS.items()}
    for name, (game, runs) in (groups | {"transfer": ("sokoban", found["frozen_lake_alpha_2"])}).items():
        after = [tried(each, game, seed) for seed, each in enumerate(runs)]
        reached[name] = [each["accuracy"] for each in after]
        effective = [each["effective"] for each in after]
        figures |= figures_of(name, reached[name]) | figures_of(f"{name}_effective", effective)
        for measure, values, start in (
            ("gain", reached[name], before[game]["accuracy"]),
            ("effective_gain", effective, before[game]["effective"]),
        ):
            figures |= figures_of(f"{name}_{measure}", [value - start for value in values])
        figures[f"{name}_seconds"] = mean(each.summary["train_seconds"] for each in runs)
    learned = {name: [mean(each.column("reward/mean")) for each in runs] for name, runs in found.items()}
    for name, one, other in (
        ("sokoban_gigpo_minus_grpo", "sokoban_gigpo", "sokoban_alpha_2"),
        ("frozen_lake_alpha_2_minus_0", "frozen_lake_alpha_2", "frozen_lake_alpha_0"),
        ("sokoban_alpha_2_minus_0", "sokoban_alpha_2", "sokoban_alpha_0"),
    ):
        for suffix, values in (("", reached), ("_while_learning", learned)):
            figures |= figures_of(f"{name}{suffix}", [a - b for a, b in zip(values[one], values[other], strict=True)])
    names = [name for name in figures if not name.endswith(("_low", "_high"))]
    rows = [
        [name, *(f"{figures.get(name + end, figures[name]):.3f}" for end in ("", "_low", "_high"))] for name in names
    ]
    print("\n" + table(["", "mean", "from", "to"], rows))
    return figures


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
