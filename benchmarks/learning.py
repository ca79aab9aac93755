"""What algorithms learn, on tasks that a tiny model learns in a minute: accuracy after training, over seeds.

    python benchmarks/learning.py [--seeds 5] [--only staleness critics credit pieces] [--resume]

staleness  six losses where every sample is 0, 2 or 8 versions old: exactly so, in a deterministic run in which nothing is in
           flight while weights change; two updates a step
critics    PPO with a critic of the actor's size, AsyPPO with two of an eighth of it, GRPO without
credit     the rhythm of attention against the same share of tokens at random and by entropy, on Countdown
pieces     what DAPO adds to GRPO, one at a time

All settings of a seed go on from the same supervised warm start. Intervals are Student's at 95 % over seeds, those of
differences over pairs of one seed. Two runs at a time, each one process with one thread; it takes about two hours, and
`--resume` goes on where it was interrupted. Every section's gains are drawn in `docs/images/learning_<section>.png`.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from _common import ROOT, WHOLE_RUN, device_name, interval, table, write_result
from _runs import Finished, run

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MEASURES = (
    *WHOLE_RUN,
    "antiphon.algorithms",
    "antiphon.learning.objectives.critic",
    "antiphon.learning.model.attention_stats",
)

ADDITION = ROOT / "recipes" / "tiny_arithmetic" / "config.yaml"
COUNTDOWN = ROOT / "benchmarks" / "learning" / "countdown.yaml"
ALWAYS = ("cluster.debug=true", "record.live=off", "evaluation.minimum_accuracy=0", "rollout.deterministic=true")
STEPS = 120

AGES = (0, 2, 8)
LOSSES = {  # all on the same advantages
    "grpo": {"recipe": "grpo", "clip_high": 0.28},
    "tis": {"recipe": "tis"},
    "cispo": {"recipe": "cispo"},
    "topr": {"recipe": "topr", "advantage": "grpo"},
    "weighted_topr": {"recipe": "weighted_topr", "advantage": "grpo"},
    "decoupled_ppo": {"recipe": "decoupled_ppo", "clip_high": 0.28},
}
RHYTHM = {"window": 4, "horizon_low": 2, "horizon_high": 12}  # for answers of about 13 tokens
TWO_UPDATES = "learner.minibatches=2"
Settings = Mapping[str, tuple[str, ...]]


def _set(section: str, **values: Any) -> str:
    return f"{section}={json.dumps(values)}"


def staleness() -> Settings:
    return {
        f"{loss}_age{age}": (_set("algorithm", **algorithm), f"rollout.async_ratio={age}", TWO_UPDATES)
        for age in AGES
        for loss, algorithm in LOSSES.items()
    }


def critics(actor: Path, small: Path) -> Settings:
    learning: dict[str, Any] = {"optimizer": {"learning_rate": 1e-3}, "warmup_steps": 5}
    two = {"path": str(small), "count": 2, "disjoint": True}
    return {
        "grpo": (_set("algorithm", recipe="grpo", clip_high=0.28),),
        "ppo": (_set("algorithm", recipe="ppo", clip_high=0.28), _set("critic", path=str(actor), **learning)),
        "asyppo": (_set("algorithm", recipe="asyppo"), _set("critic", **two, **learning)),
    }


def credit() -> Settings:
    kinds = ("random", "entropy", "local", "global", "coupled")
    amplified = {kind: (_set("algorithm", recipe="grpo", rhythm={"kind": kind, **RHYTHM}),) for kind in kinds}
    return {"grpo": (_set("algorithm", recipe="grpo"),), **amplified}


def pieces() -> Settings:
    plain = {"recipe": "grpo", "aggregation": "sequence_mean_token_mean"}
    parts: dict[str, dict[str, Any]] = {
        "clip_higher": {"clip_high": 0.28},
        "token_mean": {"aggregation": "token_mean"},
        "overlong": {"reward": {"overlong_tokens": 2}},  # a right answer has at most 10 of the 12 tokens
    }
    everything = {key: value for part in parts.values() for key, value in part.items()}
    spread = "rollout.filter=spread"
    return {
        "plain": (_set("algorithm", **plain), TWO_UPDATES),
        **{name: (_set("algorithm", **plain | part), TWO_UPDATES) for name, part in parts.items()},
        "dynamic_sampling": (_set("algorithm", **plain), spread, TWO_UPDATES),
        "all": (_set("algorithm", **plain | everything), spread, TWO_UPDATES),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--only", nargs="*", default=["staleness", "critics", "credit", "pieces"])
    arguments.add_argument("--runs", type=Path, default=Path("runs/learning"))
    arguments.add_argument("--resume", action="store_true")
    options = arguments.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ADDITION.parent}:{COUNTDOWN.parent}"}

    def make(verb: str, config: Path, name: str, *overrides: str) -> Finished:
        return run(verb, config, name, *ALWAYS, *overrides, runs=options.runs, resume=options.resume)

    def seed_of(number: int) -> dict[str, dict[str, Finished]]:
        """All runs of a seed: by section, by setting."""
        return {section: dict(_section(section, number, make)) for section in options.only}

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(seed_of, range(options.seeds)))
    figures = {key: value for key, value in measured_before().items() if not key.startswith(tuple(options.only))}
    figures["seeds"] = options.seeds
    for section in options.only:
        measured = report(section, [seed[section] for seed in found])
        draw(section, measured, ROOT / "docs" / "images" / f"learning_{section}.png")
        figures |= {f"{section}_{name}_{key}": value for name, row in measured.items() for key, value in row.items()}
    print(f"\nwritten to {write_result('learning', figures, measures=MEASURES)}")


def measured_before() -> dict[str, float]:
    """The figures of the sections that are there already."""
    result = ROOT / "benchmarks" / "results" / device_name() / "learning.json"
    figures: dict[str, float] = json.loads(result.read_text(encoding="utf-8"))["figures"] if result.exists() else {}
    return figures


def _section(section: str, seed: int, make: Callable[..., Finished]) -> Iterator[tuple[str, Finished]]:
    """The runs of a section with one seed, each as it ends."""
    config = COUNTDOWN if section == "credit" else ADDITION
    warm = make("sft", config, f"warm-{config.parent.name}-{seed}", f"seed={seed}").checkpoint
    match section:
        case "staleness":
            settings = staleness()
        case "critics":
            small = make(
                "sft", ADDITION, f"warm-small-{seed}", f"seed={seed}", "model.path=parts:build_small"
            ).checkpoint
            settings = critics(warm, small)
        case "credit":
            settings = credit()
        case _:
            settings = pieces()
    for name, overrides in settings.items():
        begin = (f"seed={seed}", f"steps={STEPS}", "sft=null", f"model.path={warm}")
        yield name, make("train", config, f"{section}-{name}-{seed}", *begin, *overrides)
        print(f"seed {seed}  {section:10} {name}", flush=True)


def report(section: str, seeds: list[dict[str, Finished]]) -> dict[str, dict[str, float]]:
    """The section's table, printed: the figures of every setting."""
    measured: dict[str, dict[str, float]] = {}
    names = list(seeds[0])
    for name in names:
        runs = [seed[name] for seed in seeds]
        base = [seed[_compared_with(section, name, names)] for seed in seeds]
        accuracies, theirs = ([each.summary["accuracy_after"] for each in column] for column in (runs, base))
        gains = [ours - other for ours, other in zip(accuracies, theirs, strict=True)]
        measured[name] = {
            "accuracy": mean(accuracies),
            "accuracy_interval": interval(accuracies),
            "gain": mean(gains),
            "gain_interval": interval(gains),
            "reward": mean(mean(each.column("reward/mean")) for each in runs),
            "age": mean(mean(each.column("age/mean")[10:]) for each in runs),
            "mismatch_kl": mean(mean(each.column("learner/mismatch_kl")) for each in runs),
        }
    rows = [[name, *(f"{value:.3f}" for value in row.values())] for name, row in measured.items()]
    print(f"\n{section}\n" + table(["setting", *next(iter(measured.values()))], rows))
    return measured


def draw(section: str, measured: dict[str, dict[str, float]], target: Path) -> None:
    """Accuracy, and what a setting gains over the one that it is compared with, each with its interval."""
    names = list(measured)[::-1]
    figure, axes = plt.subplots(1, 2, figsize=(9, 1 + 0.24 * len(names)), dpi=120, sharey=True)
    for axis, key in zip(axes, ("accuracy", "gain"), strict=True):
        values, spans = ([measured[name][part] for name in names] for part in (key, f"{key}_interval"))
        axis.errorbar(values, range(len(names)), xerr=spans, fmt="o", markersize=4, capsize=3)
        axis.set(xlabel=key, yticks=range(len(names)), yticklabels=names)
        axis.grid(alpha=0.3)
    axes[1].axvline(0, color="black", linewidth=0.8)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)


def _compared_with(section: str, name: str, names: list[str]) -> str:
    """What a setting's gain is over: the same loss on fresh samples, else the first of the section."""
    return f"{name.rpartition('_age')[0]}_age0" if section == "staleness" else names[0]


if __name__ == "__main__":
    main()
