"""Weights & Biases, online or offline."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.record.trackers.base import (
    COLUMNS,
    SFT,
    TRAIN,
    Clock,
    LastSteps,
    Row,
    RunTracker,
    TrackedRun,
    check_installed,
)
from antiphon.record.trackers.config import WandbConfig

_AXES = {SFT: "sft/step", TRAIN: "step"}  # the metric that is the x-axis of a phase


class WandbTracker(RunTracker):
    """Logs to one run there, whose id the run directory keeps.

    Offline, the library cannot add to what an earlier process wrote, and what a killed process wrote is torn. Its files that
    were not synced yet are therefore written anew, from the run's own.
    """

    options: WandbConfig

    def __init__(self, directory: Path, clock: Clock, options: Any = None) -> None:
        super().__init__(directory, clock, options or WandbConfig())
        check_installed("wandb", "wandb")
        self._wandb: Any = None
        self._run: Any = None

    def start(self, run: TrackedRun) -> LastSteps:
        """Open the run there; offline begin it anew, unless it was synced."""
        import wandb

        self._wandb, options, offline = wandb, self.options, self.options.mode == "offline"
        if not offline and not wandb.setup().settings.api_key:
            raise RuntimeError("no API key: `wandb login`, WANDB_API_KEY, or mode: offline")
        self.directory.mkdir(parents=True, exist_ok=True)
        synced = self._remove_unsynced() if offline else False
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=options.name or run.name,
            group=options.group,
            tags=options.tags,
            mode=options.mode,
            id=self.run_id(),
            resume="allow",
            dir=str(self.directory.parent),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric=_AXES[TRAIN])
        self._run.define_metric("sft/*", step_metric=_AXES[SFT])
        if synced:  # they are there, whether or not a resume has undone them
            return {phase: self.read_state().get(phase, 0) for phase in _AXES}
        if offline:
            return {}
        return {phase: int(self._run.summary.get(axis) or 0) for phase, axis in _AXES.items()}

    def _remove_unsynced(self) -> bool:
        """Remove the files of earlier processes that were not synced; return True if some were."""
        synced = False
        for folder in self.directory.glob(f"offline-run-*-{self.run_id()}"):
            if any(folder.glob("*.synced")):
                synced = True
            else:
                shutil.rmtree(folder)
        return synced

    def log(self, phase: str, step: int, metrics: Mapping[str, float], samples: Sequence[Row]) -> None:
        """Log one row of the run's history."""
        row: dict[str, Any] = {**metrics, _AXES[phase]: step}
        if samples:
            data = [[sample[name] for name in COLUMNS] for sample in samples]
            row["samples"] = self._wandb.Table(columns=list(COLUMNS), data=data)
        self._run.log(row)

    def finish(self, run: TrackedRun, model: Path | None) -> None:
        """Log configuration and model as artifacts, and end the run there."""
        if model is not None:
            artifact = self._wandb.Artifact(f"model-{self._run.id}", type="model")
            artifact.add_file(str(run.directory.config), name="config.yaml")
            if self.options.weights:
                artifact.add_dir(str(model), name="model")
            else:
                artifact.add_reference(f"file://{model.resolve()}", name="model", checksum=False)
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=0 if model is not None else 1)

    def abandon(self) -> None:
        """End the session, so that another can begin."""
        if self._run is not None:
            self._run.finish(exit_code=1)
