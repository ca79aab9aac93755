"""How well the planner foretells the tiny recipe: a probe at the recipe's own settings, then runs at others.

    python benchmarks/plan.py [--rounds 3] [--steps 80]

One warm start. Then, so often as there are rounds: a probe, and each setting predicted from it and run, minutes apart,
because the machine's own speed changes from one hour to the next. Off by: predicted over measured, minus 1; shares in points.
"""

import argparse
from pathlib import Path
from statistics import median

from _common import ROOT, WHOLE_RUN, table, write_result
from _runs import run

from antiphon.core.config import add_import_folder, load
from antiphon.record.timeline import Timeline
from antiphon.run.config import RunConfig
from antiphon.simulate.planner import WARM_UP, predict
from antiphon.simulate.probe import SECONDS, measure

MEASURES = (*WHOLE_RUN, "antiphon.simulate.planner", "antiphon.simulate.probe")

RECIPE = ROOT / "recipes" / "tiny_arithmetic" / "config.yaml"
SETTINGS = {  # none of which the probe runs
    "alpha 0, 12 x 16": ("rollout.async_ratio=0", "rollout.groups_per_step=12", "rollout.group_size=16"),
    "alpha 0.5": ("rollout.async_ratio=0.5",),
    "alpha 2, 32 x 4": ("rollout.async_ratio=2", "rollout.groups_per_step=32", "rollout.group_size=4"),
    "alpha 1, redundancy": ("rollout.redundancy=2", "rollout.extra_groups=8", "rollout.order=ready"),
}


def main() -> None:
    """Probe, predict, measure; print the table, write the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=80)
    arguments.add_argument("--runs", type=Path, default=Path("runs/plan"))
    options = arguments.parse_args()
    warm = run("sft", RECIPE, "warm", runs=options.runs)
    common = ("sft=null", f"model.path={warm.checkpoint}", "evaluation.minimum_accuracy=0", "record.events=true")
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in SETTINGS}
    for number in range(options.rounds):
        add_import_folder(RECIPE)
        base = (*common, f"record.directory={options.runs}", "record.live=off", f"seed={number}")
        speeds = measure(load(RECIPE, base, model=RunConfig), SECONDS)
        for name, overrides in SETTINGS.items():
            plan = predict(load(RECIPE, (*base, *overrides), model=RunConfig), speeds)
            label = f"{''.join(c if c.isalnum() else '_' for c in name)}-{number}"
            steps = (f"steps={options.steps}", f"seed={number}", "evaluation.limit=10")
            real = run("train", RECIPE, label, *common, *steps, *overrides, runs=options.runs)
            with (real.directory / "events.jsonl").open() as lines:
                seen = Timeline.read(lines)
            measured = (seen.step_seconds(WARM_UP), seen.learner_idle(WARM_UP), seen.engines_idle(WARM_UP))
            predicted = (plan.step_seconds, plan.learner_idle, plan.engines_idle)
            found[name].append((*predicted, *measured))
            print(number, name, *(f"{value:.3f}" for value in found[name][-1]), flush=True)
    report(found)


def report(found: dict[str, list[tuple[float, ...]]]) -> None:
    """Medians over the rounds of each quantity, and of each error."""
    rows, figures = [], {}
    worst = {"step_time_off": 0.0, "idle_off": 0.0}
    for name, rounds in found.items():
        key = "".join(c if c.isalnum() else "_" for c in name)
        step, learner, engines, real_step, real_learner, real_engines = (
            median(column) for column in zip(*rounds, strict=True)
        )
        off = median(row[0] / row[3] - 1 for row in rounds)
        idle = max((median(row[i] - row[i + 3] for row in rounds) for i in (1, 2)), key=abs)
        worst["step_time_off"] = max(worst["step_time_off"], abs(off))
        worst["idle_off"] = max(worst["idle_off"], abs(idle))
        figures |= {
            f"{key}_step_seconds_predicted": step,
            f"{key}_step_seconds_measured": real_step,
            f"{key}_learner_idle_predicted": learner,
            f"{key}_learner_idle_measured": real_learner,
            f"{key}_engines_idle_predicted": engines,
            f"{key}_engines_idle_measured": real_engines,
        }
        shares = (learner, real_learner, engines, real_engines)
        rows.append(
            [
                name,
                f"{step:.3f}",
                f"{real_step:.3f}",
                f"{off:+.0%}",
                *(f"{x:.0%}" for x in shares),
                f"{100 * idle:+.0f}",
            ]
        )
    heads = [
        "setting",
        "s a step",
        "measured",
        "off",
        "learner idle",
        "measured",
        "engines idle",
        "measured",
        "off most",
    ]
    print(table(heads, rows))
    print("written:", write_result("plan", figures | worst, measures=MEASURES))


if __name__ == "__main__":
    main()
