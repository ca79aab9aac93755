"""What the recipes for clusters are foretold to be like, by sizes and data sheets alone: no such cluster has run them.

    python benchmarks/plans.py [RECIPE ...]

For each recipe: memory of the fullest devices, then its own loop, scheduler and pool in virtual time, on as many simulated
engines as it has. The lower row of two leaves out the hand-over of weights, whose speed was measured on two CPU cores.
"""

import argparse
import re
import time
from concurrent.futures import ProcessPoolExecutor

from _common import ROOT, SIMULATION, table, write_result

from antiphon.core.config import load
from antiphon.run.config import RunConfig
from antiphon.simulate.device_memory import device_memory, find_misfits
from antiphon.simulate.devices import DEVICES, resolve_on_devices
from antiphon.simulate.model_facts import read_model_facts
from antiphon.simulate.planner import Prediction, predict
from antiphon.simulate.speed_estimate import estimate
from antiphon.simulate.speeds import Speeds

MEASURES = (
    *SIMULATION,
    "antiphon.simulate.planner",
    "antiphon.simulate.closed_form",
    "antiphon.simulate.device_split",
    "antiphon.simulate.model_shape",
    "antiphon.simulate.model_facts",
    "antiphon.simulate.device_memory",
    "antiphon.simulate.speed_estimate",
    "antiphon.simulate.devices",
)

FOLDER = ROOT / "recipes" / "clusters"
RECIPES = {
    "dense_7b_8gpu": "h100",
    "dense_7b_8gpu_colocated": "h100",
    "dense_32b_64gpu": "h100",
    "moe_235b_1024gpu": "h200",
}
HEADINGS = ["recipe", "s a step", "learner idle", "engines idle", "mean age", "tokens/s", "CPU time"]


def main() -> None:
    """Plan every recipe; print the tables, write the results."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("recipes", nargs="*", default=list(RECIPES))
    options = arguments.parse_args()
    rows: list[list[str]] = []
    memory: dict[str, dict[str, int]] = {}
    for name in options.recipes:
        config = load(FOLDER / f"{name}.yaml", [f"model.path={_model(name)}"], model=RunConfig)
        device = DEVICES[RECIPES[name]]
        model, lent = (
            read_model_facts(config),
            len(resolve_on_devices(config, RECIPES[name]).time_shared.get("engine", ())),
        )
        need = device_memory(model, config, device)
        figures = {key(part, "gib"): size / 2**30 for part, size in need.items()}
        memory[name] = need
        speeds = estimate(config, model, device, lent)
        variants = {"": speeds, "weights at once": at_once(speeds)}
        with ProcessPoolExecutor(len(variants)) as both:
            found = both.map(simulated, [(config, known, lent) for known in variants.values()])
        for label, (plan, took) in zip(variants, found, strict=True):
            rows.append(row(label or name, plan, took))
            figures |= figures_of(label, plan) | {key(label, "cpu_seconds"): took}
        print(*find_misfits(model, config, device), sep="\n", flush=True)
        print("written:", write_result(f"plans_{name}", figures, measures=MEASURES), flush=True)
    print(table(HEADINGS, rows))
    parts = [[part, *(f"{of[part] / 2**30:,.1f}" for of in memory.values())] for part in need]
    print(table(["GiB of each device", *memory], parts))


def _model(name: str) -> str:
    """Its directory, wherever this was called."""
    return str(ROOT / load(FOLDER / f"{name}.yaml", model=RunConfig).model.path)


def simulated(run: tuple[RunConfig, Speeds, int]) -> tuple[Prediction, float]:
    """A prediction, and the seconds of a core that it took."""
    config, known, lent = run
    began = time.process_time()
    return predict(config, known, lent=lent), time.process_time() - began


def at_once(speeds: Speeds) -> Speeds:
    """The same, if weights took no time from learner to engines."""
    return speeds.model_copy(
        update={
            "engine": speeds.engine.model_copy(update={"load": 0.0}),
            "learner": speeds.learner.model_copy(update={"publish": 0.0}),
        }
    )


def row(label: str, plan: Prediction, took: float) -> list[str]:
    """For a person."""
    age = sum(age * share for age, share in plan.ages.items())
    idle = f"{plan.learner_idle:.0%}", f"{plan.engines_idle:.0%}"
    return [label, f"{plan.step_seconds:,.0f}", *idle, f"{age:.2f}", f"{plan.tokens_per_second:,.0f}", f"{took:.0f} s"]


def figures_of(label: str, plan: Prediction) -> dict[str, float]:
    """For the result."""
    return {
        key(label, "step_seconds"): plan.step_seconds,
        key(label, "learner_idle"): plan.learner_idle,
        key(label, "engines_idle"): plan.engines_idle,
        key(label, "mean_age"): sum(age * share for age, share in plan.ages.items()),
        key(label, "tokens_per_second"): plan.tokens_per_second,
    }


def key(*words: str) -> str:
    """A name for a figure."""
    return "_".join(re.findall(r"\w+", " ".join(words)))


if __name__ == "__main__":
    main()
