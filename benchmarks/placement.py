"""Two devices, three ways to divide them between training and generation; and what the planner would have chosen.

    python benchmarks/placement.py [--rounds 3] [--steps 80]

On two cores:

co_located     learner and two engines on both cores, in turns: a learner of two threads, engines that sleep meanwhile
overlapping    engines on both cores, the learner on one: its engine sleeps while it trains, the other goes on
disaggregated  one core each

One warm start of the tiny recipe. Then two probes, with a learner of one thread and of two; and round by round each placement,
with what the planner foretells of it. Memory is the peak of the summed proportional set size of all processes of a run.
Last the same three on simulated devices, eight of them: what runs of long answers would gain.

On a machine with a GPU that is what learner and engines share; the other device is a core, since to overlap with one GPU an
engine must be elsewhere:

co_located     learner and one engine on the GPU, in turns
overlapping    besides them an engine on a core, which goes on while the learner trains
disaggregated  learner on the GPU, the engine on a core

There is then no probe, and nothing is foretold or simulated: the planner takes all engines to be equally fast.
"""

import argparse
from pathlib import Path
from statistics import fmean, median

from _common import ROOT, WHOLE_RUN, table, write_result
from _runs import Peak, run

from antiphon.cluster.devices import this_machine
from antiphon.core.config import add_import_folder, load
from antiphon.inspect.audit import audit
from antiphon.record.timeline import Timeline
from antiphon.run.config import RunConfig
from antiphon.simulate.device_split import iterate_splits, split_devices
from antiphon.simulate.planner import WARM_UP, predict
from antiphon.simulate.probe import SECONDS, measure_devices
from antiphon.simulate.speeds import Speeds
from antiphon.simulate.workloads import DistributionConfig

MEASURES = (
    *WHOLE_RUN,
    "antiphon.run.device_sharing",
    "antiphon.cluster.placement",
    "antiphon.simulate.planner",
    "antiphon.simulate.closed_form",
    "antiphon.simulate.device_split",
    "antiphon.simulate.probe",
    "antiphon.simulate.probe_fit",
)

RECIPE = ROOT / "recipes" / "tiny_arithmetic" / "config.yaml"
FIRST, SECOND = (f"cpu:{core}-{core}" for core in this_machine().cores[:2])
BOTH = f"{FIRST}, {SECOND}"
TWO_ENGINES = ("engine.replicas=2", "engine.slots=96")
ON_CORES = {
    "co_located": (
        f"placement.learner={BOTH}",
        "placement.engine=with learner",
        "learner.threads=2",
        *TWO_ENGINES,
    ),
    "overlapping": (f"placement.learner={FIRST}", f"placement.engine={BOTH}", *TWO_ENGINES),
    "disaggregated": (f"placement.learner={FIRST}", f"placement.engine={SECOND}"),
}
ON_GPU = {
    "co_located": ("placement.learner=gpu:0", "placement.engine=with learner"),
    "overlapping": ("placement.learner=gpu:0", "placement.engine=gpu:0, cpu:1", *TWO_ENGINES),
    "disaggregated": ("placement.learner=gpu:0", "placement.engine=cpu:1"),
}
SHARES = {"co_located": (2, 2, 2), "overlapping": (2, 1, 1), "disaggregated": (1, 1, 0)}  # engines, learners, lent
DEVICES = 8
LONG = DistributionConfig(kind="lognormal", mean=400, spread=1.0, maximum=4096)


def main() -> None:
    """Probe, predict, measure; print the tables, write the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=80)
    arguments.add_argument("--runs", type=Path, default=Path("runs/placement"))
    arguments.add_argument("--out", type=Path, default=None)
    options = arguments.parse_args()
    warm = run("sft", RECIPE, "warm", runs=options.runs)
    common = ("sft=null", f"model.path={warm.checkpoint}", "evaluation.minimum_accuracy=0", "record.events=true")
    add_import_folder(RECIPE)
    config = load(RECIPE, (*common, f"record.directory={options.runs}", "record.live=off"), model=RunConfig)
    on_gpu = bool(this_machine().gpus)
    speeds = None if on_gpu else measure_devices(config, SECONDS, 2)
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        for name, overrides in (ON_GPU if on_gpu else ON_CORES).items():
            these = (*common, f"steps={options.steps}", f"seed={number}", *overrides)
            for key, value in measured(f"{name}-{number}", these, options.runs).items():
                found.setdefault(name, {}).setdefault(key, []).append(value)
            print(number, name, found[name]["step_seconds"][-1], flush=True)
    figures = {f"{name}_{key}": fmean(values) for name, each in found.items() for key, values in each.items()}
    if speeds is not None:
        foretell(found, figures, speeds, config)
    rows = [[name, *(f"{fmean(values):.4g}" for values in each.values())] for name, each in found.items()]
    print(table(["placement", *found["co_located"]], rows))
    if speeds is not None:
        print(table([f"{DEVICES} devices", "s a step", "against the best"], simulated(config, speeds, figures)))
    print("written:", write_result("placement", figures, options.out, measures=MEASURES))


def measured(name: str, overrides: tuple[str, ...], runs: Path) -> dict[str, float]:
    """What a run came to."""
    peak = Peak()
    finished = run("train", RECIPE, name, *overrides, runs=runs, peak=peak)
    with (finished.directory / "events.jsonl").open() as lines:
        timeline = Timeline.read(lines)
    return {
        "step_seconds": timeline.step_seconds(WARM_UP),
        "learner_idle": timeline.learner_idle(WARM_UP),
        "engines_idle": timeline.engines_idle(WARM_UP),
        "age_mean": fmean(finished.column("age/mean")),
        "age_max": max(finished.column("age/max")),
        "tokens_read_again": finished.column("tokens/requeued")[-1] / len(finished.steps),
        "peak_mib": peak.bytes / 2**20,
        "accuracy_after": finished.summary["accuracy_after"],
        "violations": float(len(audit(finished.directory).violations)),
    }


def foretell(
    found: dict[str, dict[str, list[float]]], figures: dict[str, float], speeds: Speeds, config: RunConfig
) -> None:
    """Add what the planner says of each placement; print its choice against the fastest."""
    for name, (engines, learners, lent) in SHARES.items():
        settings = config.model_copy(
            update={"engine": config.engine.model_copy(update={"slots": config.engine.slots // engines})}
        )
        plan = predict(settings, speeds, engines=engines, learners=learners, lent=lent)
        figures[f"{name}_step_seconds_predicted"] = plan.step_seconds
        found[name]["predicted"] = [plan.step_seconds]
    chosen = split_devices(config, speeds, this_machine())[1]
    choice = next(name for name, share in SHARES.items() if share == (chosen.engines, chosen.learners, chosen.shared))
    best = min(found, key=lambda name: median(found[name]["step_seconds"]))
    pairs = zip(found[choice]["step_seconds"], found[best]["step_seconds"], strict=True)
    figures["choice_over_best"] = median(mine / least for mine, least in pairs)
    figures["learner_parallel_share"] = speeds.learner.parallel
    print(f"the planner chooses {choice}; measured best: {best}; {figures['choice_over_best']:.2f} times its step")


def simulated(config: RunConfig, speeds: Speeds, figures: dict[str, float]) -> list[list[str]]:
    """The three on simulated devices whose learner divides its work evenly, with answers of long-tailed lengths."""
    long = speeds.model_copy(
        update={
            "response_tokens": LONG,
            "learner": speeds.learner.model_copy(update={"parallel": 1.0, "beside_engines": 1.0}),
            "engine": speeds.engine.model_copy(update={"beside_learner": 1.0}),
        }
    )
    sampling = config.rollout.sampling.model_copy(update={"max_tokens": 4096})
    rollout = config.rollout.model_copy(update={"sampling": sampling, "groups_per_step": 48})
    settings = config.model_copy(
        update={"rollout": rollout, "engine": config.engine.model_copy(update={"slots": 64, "max_length": 0})}
    )
    best: dict[str, float] = {}
    for split in iterate_splits(settings, long, DEVICES):
        kind = "disaggregated" if not split.shared else "co_located" if split.shared == DEVICES else "overlapping"
        best[kind] = min(best.get(kind, split.seconds), split.seconds)
    figures |= {f"simulated_{kind}_step_seconds": seconds for kind, seconds in best.items()}
    least = min(best.values())
    return [[kind, f"{seconds:.3g}", f"{seconds / least:.2f}"] for kind, seconds in best.items()]


if __name__ == "__main__":
    main()
