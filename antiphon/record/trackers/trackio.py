"""Trackio: a local database with a dashboard, or a Hugging Face Space."""

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
from antiphon.record.trackers.config import TrackioConfig


class TrackioTracker(RunTracker):
    """Logs to one run there. Trackio resumes runs by their names, so the name ends in an id that the run directory keeps."""

    options: TrackioConfig

    def __init__(self, directory: Path, clock: Clock, options: Any = None) -> None:
        super().__init__(directory, clock, options or TrackioConfig())
        check_installed("trackio", "trackio")
        self._trackio: Any = None
        self._run: Any = None

    def start(self, run: TrackedRun) -> LastSteps:
        """Open the run there, or create it."""
        import trackio

        self._trackio, options = trackio, self.options
        self._run = trackio.init(
            project=options.project,
            name=f"{options.name or run.name}-{self.run_id()[:6]}",
            group=options.group,
            space_id=options.space,
            config=dict(run.config),
            resume="allow",
            embed=False,
        )
        if options.space:
            return {phase: self.read_state().get(phase, 0) for phase in (SFT, TRAIN)}
        return self._find_last()

    def _find_last(self) -> LastSteps:
        from trackio.sqlite_storage import SQLiteStorage

        last = {SFT: 0, TRAIN: 0}
        for row in SQLiteStorage.get_logs(self.options.project, self._run.name, run_id=self._run.id):
            for phase in last:
                if f"{phase}/lineage" in row:
                    last[phase] = max(last[phase], row["step"])
        return last

    def log(self, phase: str, step: int, metrics: Mapping[str, float], samples: Sequence[Row]) -> None:
        """Log the metrics of a step and its table."""
        row: dict[str, Any] = dict(metrics)
        if samples:
            data = [[sample[name] for name in COLUMNS] for sample in samples]
            row["samples"] = self._trackio.Table(columns=list(COLUMNS), data=data)
        self._run.log(row, step=step)

    def finish(self, run: TrackedRun, model: Path | None) -> None:
        """Log configuration and model as an artifact, and end the run there."""
        if model is not None:
            artifact = self._trackio.Artifact(f"model-{self.run_id()}", type="model")
            artifact.add_file(str(run.directory.config), name="config.yaml")
            if self.options.weights:
                artifact.add_dir(str(model), name="model")
            else:
                artifact.add_reference(model.resolve().as_uri(), name="model", checksum=False)
            self._run.log_artifact(artifact)
        self._run.finish()

    def abandon(self) -> None:
        """End the session, so that another can begin."""
        if self._run is not None:
            self._run.finish()
