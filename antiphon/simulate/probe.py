"""Measure a machine for the planner: a run's real parts, for a minute or two, seen through their events.

Three phases run on the same engines and learner. The first and the last are synchronous, with the groups of a step and with a
quarter of them: each part works alone, and seconds against sizes give its speed. The second is asynchronous and shows how
much slower each part is beside the other. All is read from the run's own events and metrics; nothing is instrumented.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from antiphon.cluster.config import PlacementConfig
from antiphon.cluster.devices import this_machine
from antiphon.core.config import dump
from antiphon.core.deadlines import Deadlines
from antiphon.core.types import Group
from antiphon.record.ledger import Ledger
from antiphon.record.live import View
from antiphon.record.run_dir import RunDirectory
from antiphon.record.store import LedgerStore
from antiphon.record.trackers import TrackersConfig
from antiphon.rollout.group_hooks import GroupHooks
from antiphon.run.build import start_run
from antiphon.run.config import RunConfig
from antiphon.run.loop import Run
from antiphon.simulate.probe_fit import fit
from antiphon.simulate.probe_phases import make_phases, read_phases
from antiphon.simulate.speeds import Speeds, parallel_share

PROBE = "-probe"  # suffix of the name of the probe's run
SECONDS = 100.0  # of the three phases together; the parts also need a while to start
MIN_STEPS = 6  # of a phase, however long they take


class TimedView:
    """A `View` that stops the run when its time is up and enough steps are done."""

    def __init__(self, shown: View, seconds: float) -> None:
        self.run: Run | None = None
        self._shown = shown
        self._until = asyncio.get_running_loop().time() + seconds

    def start(self, name: str, note: str = "") -> None:
        """Show nothing."""

    def step(self, step: int, steps: int, metrics: Mapping[str, float], deadlines: Deadlines) -> None:
        """Show a step, and stop the run if it may end."""
        self._shown.step(step, steps, metrics, deadlines)
        if self.run is not None and step >= MIN_STEPS and asyncio.get_running_loop().time() >= self._until:
            self.run.stop()

    def message(self, text: str) -> None:
        """Show a message."""
        self._shown.message(text)

    def close(self) -> None:
        """Show nothing; the run that the view belongs to closes it."""


def measure_devices(config: RunConfig, seconds: float, devices: int) -> Speeds:
    """Measure a run, and on a machine without GPUs also the speed-up of a learner with `devices` threads, in a second probe."""
    one = measure(config.model_copy(update={"learner": config.learner.model_copy(update={"threads": 1})}), seconds)
    if devices == 1 or this_machine().gpus:
        return one
    threads = config.learner.model_copy(update={"threads": devices})
    many = measure(config.model_copy(update={"learner": threads}), seconds)
    share = parallel_share(one.learner, many.learner, devices)
    speeds = one.model_copy(update={"learner": one.learner.model_copy(update={"parallel": share})})
    _write_speeds(config, speeds)
    return speeds


def speeds_path(config: RunConfig) -> Path:
    """Return the path to which a probe of the run writes its speeds."""
    return Path(config.record.directory, f"{config.name}{PROBE}", "speeds.yaml")


def _write_speeds(config: RunConfig, speeds: Speeds) -> None:
    speeds_path(config).write_text(dump(speeds), encoding="utf-8")


def measure(config: RunConfig, seconds: float) -> Speeds:
    """Run a configuration for about some seconds after its warm start, and measure its speeds.

    The speeds are also written to `speeds.yaml` in the probe's run directory.
    """
    record = config.record.model_copy(update={"events": True, "trackers": TrackersConfig(), "spans": ""})
    evaluation = config.evaluation.model_copy(update={"every": 0, "minimum_accuracy": 0.0})
    plain: dict[str, Any] = {"placement": PlacementConfig(), "name": f"{config.name}{PROBE}"}
    plain["checkpoint"] = config.checkpoint.model_copy(update={"every": 0})
    changed = config.model_copy(update={**plain, "record": record, "evaluation": evaluation})
    directory, groups = asyncio.run(_run_phases(changed, seconds))
    with directory.events.open(encoding="utf-8") as lines, directory.metrics.open(encoding="utf-8") as metrics:
        speeds = fit(config, read_phases(lines, metrics), groups)
    _write_speeds(config, speeds)
    return speeds


async def _run_phases(config: RunConfig, seconds: float) -> tuple[RunDirectory, list[Group]]:
    async with start_run(config, overwrite=True) as whole:
        parts, record = whole.parts, whole.parts.record
        if config.sft:
            await Run(replace(parts, tasks=replace(parts.tasks, test=()))).sft()
        phases = make_phases(config)
        groups: list[list[Group]] = [[] for _ in phases]
        folders = (record.directory.path / f"phase-{number}" for number in range(len(phases)))
        for phase, made, folder in zip(phases, groups, folders, strict=True):

            def keep_all(group: Group, made: list[Group] = made) -> bool:
                made.append(group)
                return True  # nothing is filtered: see `make_phases`

            view = TimedView(record.view, seconds / len(phases))
            record.events.add("phase")
            folder.mkdir()
            ledger = Ledger(LedgerStore(folder), record.events)
            phase_record = replace(record, view=view, ledger=ledger)
            view.run = Run(replace(parts, config=phase, hooks=GroupHooks(filter=keep_all), record=phase_record))
            await view.run.reinforce()
            await ledger.close()
        # A policy that learns from the last phase's small steps may degrade: its responses are unlike those of a run.
        return record.directory, [group for made in groups[:-1] for group in made]
