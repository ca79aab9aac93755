"""Environments that take their time: stepped together, or each by itself; and what redundant ones are worth when some are slow.

    python benchmarks/environment_async.py [--steps 6] [--rounds 2]

Whole runs with a real engine and a real learner of the tiny recipe's model, 64 attempts a step, 20 turns each, every turn of
N(0.1 s, sigma) cut at 0. *Lock-step*: the 64 environments of a step are stepped as one, as vectorised environments are.
*Environment-level*: each goes on when its own turn has ended; the training is as synchronous as before (ratio 0), so that
nothing else differs. *Asynchronous*: ratio 1 as well. Published (ROLL Flash, arXiv 2510.11345): 2.46 at sigma = mu.

Faults, with ratio 1: one attempt of 20 is ten times as slow (fail-slow), or one of 50 never ends and is given up after
`environment_timeout` (fail-stop); without redundancy, and with a sibling and a group more than needed. Published: 7 to 16 %.

Rounds alternate between the settings; the seconds of a step are the median over rounds and steps, the first two left out.
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median

from _common import ROOT, table, write_result
from _runs import run

CONFIG = ROOT / "benchmarks" / "environment_async" / "config.yaml"
TINY = ROOT / "recipes" / "tiny_arithmetic"
MEAN, SKIPPED = 0.1, 2
ALWAYS = ("record.live=off", "record.trackers=[]", "check.prompts=0")
REDUNDANT = ("rollout.redundancy=1", "rollout.extra_groups=1", "rollout.order=ready")
WAYS = {
    "lock_step": ("rollout.policy=batch", "rollout.async_ratio=0"),
    "environment_level": ("rollout.policy=batch", "rollout.async_ratio=0"),
    "asynchronous": ("rollout.async_ratio=1",),
}
FAULTS = {
    "fail_slow": ({"slow_share": 0.05}, ()),
    "fail_stop": ({"stop_share": 0.02}, ("rollout.environment_timeout=2", "rollout.max_attempts=10")),
}


def settings() -> dict[str, tuple[str, ...]]:
    """Overrides by name."""
    found = {}
    for share in (0.1, 0.5, 1.0):
        for way, overrides in WAYS.items():
            options = {"mean": MEAN, "spread": share * MEAN}
            if way == "lock_step":
                options["together"] = True
            found[f"{way}_{share:g}"] = (_options(options), *overrides)
    for fault, (shares, overrides) in FAULTS.items():
        options = _options({"mean": MEAN, "spread": 0.5 * MEAN, **shares})
        found[fault] = (options, "rollout.async_ratio=1", *overrides)
        found[f"{fault}_redundant"] = (*found[fault], *REDUNDANT)
    return found


def _options(options: dict[str, float]) -> str:
    return f"tasks.0.environment_options={json.dumps(options)}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=6)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--runs", type=Path, default=Path("runs/environment_async"))
    options = arguments.parse_args()
    os.environ |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, TINY, CONFIG.parent)))}
    seconds: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for name, overrides in settings().items():
            more = (f"steps={options.steps}", f"seed={number}", *ALWAYS)
            finished = run("train", CONFIG, f"{name}-{number}", *more, *overrides, runs=options.runs)
            seconds.setdefault(name, []).extend(finished.column("step/seconds")[SKIPPED:])
            print(f"round {number}  {name:24} {median(seconds[name]):.2f} s a step", flush=True)
    times = {name: median(found) for name, found in seconds.items()}
    figures = {f"{name}_step_seconds": value for name, value in times.items()}
    for share in (0.1, 0.5, 1.0):
        for way in ("environment_level", "asynchronous"):
            figures[f"speedup_{way}_{share:g}"] = times[f"lock_step_{share:g}"] / times[f"{way}_{share:g}"]
    figures["speedup_sigma_equal_mu"] = figures["speedup_environment_level_1"]
    for fault in FAULTS:
        figures[f"redundancy_gain_{fault}"] = times[fault] / times[f"{fault}_redundant"] - 1
    print(table(["figure", ""], [[name, f"{value:.3f}"] for name, value in figures.items()]))
    print(f"written to {write_result('environment_async', figures)}")


if __name__ == "__main__":
    main()
