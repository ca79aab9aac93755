"""SwanLab, online or offline."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.core.yaml_text import dump_yaml
from antiphon.record.trackers.base import (
    SFT,
    TRAIN,
    Clock,
    LastSteps,
    Row,
    RunTracker,
    TrackedRun,
    check_installed,
    sample_table,
)
from antiphon.record.trackers.config import SwanlabConfig


class SwanlabTracker(RunTracker):
    """Logs to one run there, whose id the run directory keeps. Tables become texts.

    Offline, the library cannot add to what an earlier process wrote, and buffers lines that a killed process loses. The files
    of earlier processes are therefore written anew, from the run's own.
    """

    options: SwanlabConfig

    def __init__(self, directory: Path, clock: Clock, options: Any = None) -> None:
        super().__init__(directory, clock, options or SwanlabConfig())
        check_installed("swanlab", "swanlab")
        self._swanlab: Any = None
        self._run: Any = None

    def start(self, run: TrackedRun) -> LastSteps:
        """Open the run there; offline begin it anew."""
        import swanlab

        self._swanlab, options, offline = swanlab, self.options, self.options.mode == "offline"
        self.directory.mkdir(parents=True, exist_ok=True)
        if offline:
            for folder in self.directory.glob(f"run-*-{self.run_id()}"):
                shutil.rmtree(folder)
        settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        self._run = swanlab.init(
            project=options.project,
            workspace=options.workspace,
            name=options.name or run.name,
            tags=list(options.tags),
            mode=options.mode,
            id=self.run_id(),
            resume="allow",
            log_dir=str(self.directory),
            config=dict(run.config),
            settings=settings,
        )
        # Online the server drops steps that it has.
        return {} if offline else {phase: self.read_state().get(phase, 0) for phase in (SFT, TRAIN)}

    def log(self, phase: str, step: int, metrics: Mapping[str, float], samples: Sequence[Row]) -> None:
        """Log the metrics of a step and its table."""
        row: dict[str, Any] = dict(metrics)
        if samples:
            row["samples"] = self._swanlab.Text(sample_table(samples), caption=f"step {step}")
        self._run.log(row, step=step)

    def finish(self, run: TrackedRun, model: Path | None) -> None:
        """Log configuration and the model's folder as texts, and end the run there."""
        if model is not None:
            text = f"{model.resolve()}\n\n{dump_yaml(dict(run.config))}"
            self._run.log({"model": self._swanlab.Text(text, caption="model and configuration")}, step=0)
        self._run.finish()

    def abandon(self) -> None:
        """End the session, so that another can begin."""
        if self._run is not None:
            self._run.finish()
