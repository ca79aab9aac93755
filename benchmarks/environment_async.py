"""Environments that take their time, synchronous and asynchronous, and what redundant ones are worth when some are slow.

    python benchmarks/environment_async.py [--only sleepy alfworld_tail ...] [--resume]

Whole runs, each with a real engine and a real learner on this machine. `--only` takes the settings whose names begin so, and
`--resume` those that have ended as they are: figures are of all runs that are there.

**Sleepy.** The tiny recipe's model, 64 attempts a step, 20 turns each, every turn of N(0.1 s, sigma) cut at 0. *Lock-step*:
the 64 environments of a step are stepped as one, as vectorised environments are. *Environment-level*: each goes on when its own
turn has ended; training is as synchronous as before (ratio 0), so that nothing else differs. *Asynchronous*: ratio 1 as well.
Faults, with ratio 1: one attempt of 20 is ten times as slow (fail-slow), or one of 50 never ends and is given up after
`environment_timeout` (fail-stop); without redundancy, and with a sibling and a group more than needed. Published: 7 to 16 %.

**Published.** ROLL Flash (arXiv 2510.11345) has 892 s a step in lock-step and 362 s at environment level, 2.46, with turns of
N(10 s, 10 s): what the waits of 512 environments and 22 turns come to (889 and 369 s). On two cores there is room for
256 environments and 23 turns of N(0.3 s, 0.3 s), whose waits come to 2.37: `speedup_environment_level_sigma_equal_mu`, and with
ratio 1 `speedup_sigma_equal_mu`. Those of 64 and 20 come to 2.13. What a step takes beside waiting is for
engine and controller, which at environment level work while others wait.

**ALFWorld.** The environment `alfworld` (looking at things under lamps), whose answers take 0.2 s in the mean, log-normal, with
0.95 as standard deviation (`tail`); one attempt of 50 five times as slow besides (`fail_slow`); or no time at all (`none`). 32
attempts a step, 20 turns, a small model that was taught to say letters. From one to the next of these nothing else is changed:

    synchronous    lock-step as above; all attempts of a step begin together and end before it is trained on (ratio 0)
    own_pace       each environment goes on when its own turn has ended, and nothing else is different
    asynchronous   ratio 1: attempts begin whenever there is room, also while a step is trained on
    redundant      and a sibling and a group more than needed; the first to end are trained on

Published end to end for ALFWorld: 2.72, of which 2.27 for asynchrony and 1.20 for redundancy; in that work environments took up
most of a step, as they do here. With `none` a step takes what engine and learner take on this machine, which no schedule can
save: `alfworld_limit_*` is the speed-up over `synchronous` if waiting cost nothing at all.

One round of all takes about half an hour on two cores. Rounds alternate between the settings; the seconds of a step are the
mean over rounds and steps, the first two left out. Asynchronous runs are twice as long: a step that waits for a slow attempt is
followed by some that find everything ready.
"""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from _common import ROOT, WHOLE_RUN, table, write_result
from _runs import Finished, finished, run

MEASURES = (
    *WHOLE_RUN,
    "antiphon.tasks.environments.host",
    "antiphon.tasks.environments.worker",
    "antiphon_envs.alfworld",
)

FOLDER = ROOT / "benchmarks" / "environment_async"
SLEEPY, ALFWORLD = FOLDER / "config.yaml", FOLDER / "alfworld.yaml"
TINY = ROOT / "recipes" / "tiny_arithmetic"
SKIPPED, LONGER = 2, 2
ALWAYS = ("record.live=off", "record.trackers=[]", "check.prompts=0")
PUBLISHED: dict[str, Any] = {"turns": 23, "seconds": {"kind": "normal", "mean": 0.3, "spread": 0.3}}
MANY = ("rollout.groups_per_step=32", "engine.slots=288")
ROUNDS = ("rollout.policy=batch", "rollout.async_ratio=0")
REDUNDANT = ("rollout.redundancy=1", "rollout.extra_groups=1", "rollout.order=ready")
SHARES = (0.1, 0.5, 1.0)
WAYS = {"lock_step": ROUNDS, "environment_level": ROUNDS, "asynchronous": ("rollout.async_ratio=1",)}
FAULTS = {
    "fail_slow": ({"slow_share": 0.05}, ()),
    "fail_stop": ({"stop_share": 0.02}, ("rollout.environment_timeout=2", "rollout.max_attempts=10")),
}
TAIL = {"seconds": {"kind": "lognormal", "mean": 0.2, "spread": 0.8}}
WAITS: dict[str, dict[str, Any]] = {
    "none": {"seconds": {"mean": 0}},
    "tail": TAIL,
    "fail_slow": {**TAIL, "slow": 5, "slow_share": 0.02},
}
ALFWORLD_WAYS = {
    "synchronous": ROUNDS,
    "own_pace": ROUNDS,
    "asynchronous": ("rollout.async_ratio=1",),
    "redundant": ("rollout.async_ratio=1", *REDUNDANT),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run."""

    config: Path
    environment: Mapping[str, Any]  # its options
    overrides: tuple[str, ...]

    def arguments(self, steps: int, seed: int, start: Path) -> tuple[str, ...]:
        """Of the command line; an ALFWorld run begins with the model in `start`."""
        options = f"tasks.0.environment_options={json.dumps(self.environment)}"
        model = (f"model.path={start}", "sft=null") if self.config == ALFWORLD else ()
        steps *= 1 if ROUNDS[0] in self.overrides else LONGER
        return (f"steps={steps}", f"seed={seed}", *ALWAYS, *model, options, *self.overrides)


def settings() -> dict[str, Setting]:
    """All, by name."""
    found = {}
    for share in SHARES:
        for way, overrides in WAYS.items():
            together = {"together": True} if way == "lock_step" else {}
            found[f"sleepy_{way}_{share:g}"] = Setting(SLEEPY, _normal(share) | together, overrides)
    for way, overrides in WAYS.items():
        together = {"together": way == "lock_step"}
        found[f"published_{way}"] = Setting(SLEEPY, PUBLISHED | together, (*overrides, *MANY))
    for fault, (shares, overrides) in FAULTS.items():
        overrides = ("rollout.async_ratio=1", *overrides)
        found[f"sleepy_{fault}"] = Setting(SLEEPY, _normal(0.5) | shares, overrides)
        found[f"sleepy_{fault}_redundant"] = Setting(SLEEPY, _normal(0.5) | shares, (*overrides, *REDUNDANT))
    for waits, options in WAITS.items():
        for way in ("synchronous", "asynchronous") if waits == "none" else ALFWORLD_WAYS:
            overrides = ALFWORLD_WAYS[way]
            together = {"together": True} if way == "synchronous" else {}
            found[f"alfworld_{waits}_{way}"] = Setting(ALFWORLD, options | together, overrides)
    return found


def _normal(share: float) -> dict[str, Any]:
    return {"seconds": {"kind": "normal", "mean": 0.1, "spread": 0.1 * share}}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--only", nargs="+", metavar="NAME", default=[""], help="what names of settings begin with")
    arguments.add_argument("--resume", action="store_true", help="take runs that have ended as they are")
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--runs", type=Path, default=Path("runs/environment_async"))
    options = arguments.parse_args()
    if unknown := [name for name in options.only if not any(known.startswith(name) for known in settings())]:
        arguments.error(f"no setting begins with {', '.join(unknown)}; there are {', '.join(settings())}")
    os.environ |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, TINY, FOLDER)))}
    found: dict[str, list[Finished]] = {}
    for number in range(options.rounds):
        for name, setting in settings().items():
            if run_ := one(name, setting, number, options):
                found.setdefault(name, []).append(run_)
                print(f"round {number}  {name:32} {seconds(found[name]):.2f} s a step", flush=True)
    result = figures(found)
    print(table(["figure", ""], [[name, f"{value:.3f}"] for name, value in result.items()]))
    print(f"written to {write_result('environment_async', result, measures=MEASURES)}")


def one(name: str, setting: Setting, number: int, options: argparse.Namespace) -> Finished | None:
    """A run of this setting: made if it is among the chosen ones; or what there is of it, or nothing."""
    chosen, start = name.startswith(tuple(options.only)), options.runs / "start" / "model"
    arguments = setting.arguments(options.steps, number, start)
    if chosen and setting.config == ALFWORLD and not start.exists():
        checkpoint = run("sft", ALFWORLD, "start-sft", *ALWAYS, runs=options.runs).checkpoint
        start.parent.mkdir(exist_ok=True)
        start.symlink_to(checkpoint.resolve())
    if chosen:
        run_name = f"{name}-{number}"
        return run("train", setting.config, run_name, *arguments, runs=options.runs, resume=options.resume)
    if options.resume:
        return finished("train", setting.config, f"{name}-{number}", *arguments, runs=options.runs)
    return None


def seconds(runs: list[Finished]) -> float:
    """Of a step."""
    return fmean(value for run_ in runs for value in run_.column("step/seconds")[SKIPPED:])


def figures(found: dict[str, list[Finished]]) -> dict[str, float]:
    """Seconds of a step of each setting, and what they come to where both parts are there."""
    times = {name: seconds(runs) for name, runs in found.items()}
    result = {f"{name}_step_seconds": value for name, value in times.items()}
    ratios = {
        f"sleepy_speedup_{way}_{share:g}": (f"sleepy_lock_step_{share:g}", f"sleepy_{way}_{share:g}")
        for share in SHARES
        for way in ("environment_level", "asynchronous")
    }
    ratios["speedup_environment_level_sigma_equal_mu"] = ("published_lock_step", "published_environment_level")
    ratios["speedup_sigma_equal_mu"] = ("published_lock_step", "published_asynchronous")
    ratios |= {f"sleepy_redundancy_{fault}": (f"sleepy_{fault}", f"sleepy_{fault}_redundant") for fault in FAULTS}
    for waits in WAITS:
        at = f"alfworld_{waits}"
        ratios |= {
            f"alfworld_speedup_{waits}": (f"{at}_synchronous", f"{at}_redundant"),
            f"alfworld_of_own_pace_{waits}": (f"{at}_synchronous", f"{at}_own_pace"),
            f"alfworld_of_asynchrony_{waits}": (f"{at}_own_pace", f"{at}_asynchronous"),
            f"alfworld_of_redundancy_{waits}": (f"{at}_asynchronous", f"{at}_redundant"),
            f"alfworld_limit_{waits}": (f"{at}_synchronous", "alfworld_none_asynchronous"),
        }
    for name, (slow, fast) in ratios.items():
        if slow in times and fast in times:
            result[name] = times[slow] / times[fast]
    for name, runs in found.items():
        result[f"{name}_learner_waits"] = fmean(
            value for run_ in runs for value in run_.column("step/wait_groups_share")[SKIPPED:]
        )
    return result


if __name__ == "__main__":
    main()
