"""Commands that predict: simulate, plan."""

import shlex
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from antiphon.cli.arguments import ConfigPath, Overrides
from antiphon.cli.configs import load_run
from antiphon.cli.errors import exit_on_error
from antiphon.cli.tables import print_table
from antiphon.core.errors import ConfigError

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig
    from antiphon.simulate.devices import Device
    from antiphon.simulate.fitting import Load
    from antiphon.simulate.model_facts import ModelFacts
    from antiphon.simulate.outcome import Outcome
    from antiphon.simulate.speeds import Speeds

NO_CHANGE_FITS = (
    "does not fit with recomputed activations, fewer logits at once, smaller packs, fewer slots or LoRA either: use more "
    "devices (learner.mesh.shard, tensor_parallel_size in engine.options) or a smaller model"
)


def simulate(
    scenario: Annotated[str | None, typer.Argument(metavar="SCENARIO", help="YAML file of the scenario.")] = None,
    overrides: Overrides = None,
    events: Annotated[
        Path | None, typer.Option(help="Write every event to this file, one JSON object per line.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.")] = None,
    chaos: Annotated[int, typer.Option(help="Instead run N random scenarios with faults, and check each.")] = 0,
    crashes: Annotated[
        int, typer.Option(help="Instead run N random scenarios that crash, lose disk writes and resume.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the first random scenario.")] = 0,
) -> None:
    """Simulate a run in virtual time: the real loop and scheduler, with engines and a learner that only take time."""
    with exit_on_error():
        seeds = range(seed, seed + (chaos or crashes))
        if chaos:
            from antiphon.simulate.chaos import run_chaos

            print_table("how runs ended", "seeds", run_chaos(seeds, events, print))
        elif crashes:
            from antiphon.simulate.crashes import run_crashes

            print_table("how lives ended", "times", run_crashes(seeds))
        elif scenario is None:
            raise ConfigError("give the YAML file of a scenario, or --chaos N")
        else:
            print_table("measure", "value", _simulate_scenario(scenario, overrides, events, trace).table())


def _simulate_scenario(path: str, overrides: list[str] | None, events: Path | None, trace: Path | None) -> "Outcome":
    """Simulate the scenario of a file, and write its events and trace if asked for."""
    from antiphon.core.config import load
    from antiphon.record.events import write_trace
    from antiphon.simulate.run import simulate as run_scenario
    from antiphon.simulate.scenario import ScenarioConfig

    with ExitStack() as stack:
        if trace is not None and events is None:
            events = Path(stack.enter_context(TemporaryDirectory())) / "events.jsonl"
        sink = stack.enter_context(events.open("w", encoding="utf-8")) if events else None
        outcome = run_scenario(load(path, overrides or (), model=ScenarioConfig), sink)
        if sink and trace and events:
            sink.flush()
            write_trace(events, trace)
    return outcome


def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    probe: Annotated[bool, typer.Option("--probe", help="Measure speeds first with a two-minute run.")] = False,
    speeds: Annotated[
        Path | None, typer.Option(help="Use the speeds that an earlier probe wrote to this file.")
    ] = None,
    device: Annotated[str, typer.Option(help="Plan for GPUs that are not here, such as h100 or rtx4090.")] = "",
    devices: Annotated[int, typer.Option(help="Also find the best split of N devices.", min=0)] = 0,
) -> None:
    """Predict step time, idle time, staleness and memory of a run, and how to split devices."""
    with exit_on_error():
        run = load_run(config, overrides)
        from antiphon.cluster.placement import Placement
        from antiphon.run.dtypes import choose_dtypes, choose_dtypes_of_gpus
        from antiphon.simulate.devices import find_device, resolve_on_devices
        from antiphon.simulate.model_facts import read_model_facts
        from antiphon.simulate.planner import predict
        from antiphon.simulate.probe import SECONDS, measure_devices
        from antiphon.simulate.speed_estimate import estimate, measure_this_machine

        if bool(probe) + bool(speeds) + bool(device) > 1:
            raise ConfigError("give one of --probe, --speeds and --device")
        _check_plannable(run)
        gpu = find_device(device) if device else None
        run = choose_dtypes_of_gpus(run, print) if gpu else choose_dtypes(run, Placement(), print)
        lent = len(resolve_on_devices(run, device).time_shared.get("engine", ())) if device else 0
        model = read_model_facts(run)
        if speeds:
            known = _load_speeds(speeds)
        elif probe:
            known = measure_devices(run, SECONDS, max(devices, 1))
        else:
            known = estimate(run, model, gpu or measure_this_machine(run), lent)
        print_table("on average", "predicted", predict(run, known, lent=lent).table())
        print_table("memory", "MiB", {name: f"{size / 2**20:,.0f}" for name, size in model.memory(run).items()})
        if gpu:
            _print_device_memory(model, run, device, gpu)
            _print_fit(model, partial(_load_changed, config, overrides or []), gpu)
        if devices:
            _print_splits(run, known, devices)


def _check_plannable(run: "RunConfig") -> None:
    from antiphon.run.model_files import check_model_path

    check_model_path(run.model.path)
    if run.engine.also:
        raise ConfigError("the planner assumes that all engines of a pool are alike: leave it out", key="engine.also")


def _load_changed(config: str, overrides: list[str], changes: list[str]) -> "RunConfig":
    """Load a run's configuration with changes, for GPUs that are not here."""
    from antiphon.run.dtypes import choose_dtypes_of_gpus

    return choose_dtypes_of_gpus(load_run(config, [*overrides, *changes]), lambda _: None)


def _load_speeds(path: Path) -> "Speeds":
    from antiphon.core.config import load
    from antiphon.simulate.speeds import Speeds

    return load(path, model=Speeds)


def _print_device_memory(model: "ModelFacts", run: "RunConfig", name: str, device: "Device") -> None:
    """Print the memory of each device."""
    from antiphon.simulate.device_memory import device_memory

    memory = device_memory(model, run, device)
    print_table(f"memory of each {name}", "GiB", {part: f"{size / 2**30:,.1f}" for part, size in memory.items()})


def _print_fit(model: "ModelFacts", load: "Load", device: "Device") -> None:
    """Print what does not fit on the devices, and the changes with which it does."""
    from antiphon.simulate.device_memory import find_misfits
    from antiphon.simulate.fitting import find_changes

    misfits = list(find_misfits(model, load([]), device))
    if not misfits:
        print("fits")
        return
    print("\n".join(f"does not fit: {misfit}" for misfit in misfits))
    changes = find_changes(model, load, device)
    print("fits with: " + shlex.join(changes) if changes else NO_CHANGE_FITS)


def _print_splits(run: "RunConfig", speeds: "Speeds", devices: int) -> None:
    """Print the seconds of a step for each division of devices, and the best one."""
    from antiphon.simulate.device_split import iterate_splits

    found = {str(split): split.seconds for split in iterate_splits(run, speeds, devices)}
    print_table(f"{devices} devices", "seconds a step", found)
    print(f"best: {min(found, key=lambda name: found[name])}")
