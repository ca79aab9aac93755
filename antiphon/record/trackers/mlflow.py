"""MLflow: a tracking server, or a local database."""

import logging
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
    flatten_config,
)
from antiphon.record.trackers.config import MlflowConfig

_LONGEST_PARAM = 500  # characters, which every store takes
_MOST_PARAMS = 100  # a batch
_MOST_METRICS = 1000  # a batch


class MlflowTracker(RunTracker):
    """Logs to one run there, whose id the run directory keeps. What it has was read from it after a resume."""

    options: MlflowConfig

    def __init__(self, directory: Path, clock: Clock, options: Any = None) -> None:
        super().__init__(directory, clock, options or MlflowConfig())
        check_installed("mlflow", "mlflow", "sqlalchemy", "alembic")
        self._client: Any = None
        self._id = ""

    def start(self, run: TrackedRun) -> LastSteps:
        """Open the run there, or create it with the configuration as parameters."""
        import mlflow

        for name in ("mlflow", "alembic"):  # they tell of each table of a new database
            logging.getLogger(name).setLevel(logging.WARNING)
        self.directory.mkdir(parents=True, exist_ok=True)
        local = not self.options.uri and not mlflow.is_tracking_uri_set()
        uri = f"sqlite:///{self.directory.resolve() / 'mlflow.db'}" if local else self.options.uri
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._id = self.read_state().get("id", "")
        if not self._id:
            self._id = self._create(run, str(self.directory.resolve() / "artifacts") if local else None)
            self.write_state(id=self._id)
            return {}
        self._client.update_run(self._id, status="RUNNING")
        return {phase: self._find_last(phase) for phase in (SFT, TRAIN)}

    def _create(self, run: TrackedRun, artifacts: str | None) -> str:
        from mlflow.entities import Param

        name = self.options.experiment
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name, artifact_location=artifacts)
        created = self._client.create_run(experiment, run_name=self.options.name or run.name, tags=self.options.tags)
        identity: str = created.info.run_id
        params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in flatten_config(run.config).items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(identity, params=params[start : start + _MOST_PARAMS])
        self._client.log_artifact(identity, str(run.directory.config))
        return identity

    def _find_last(self, phase: str) -> int:
        return max((each.step for each in self._client.get_metric_history(self._id, f"{phase}/lineage")), default=0)

    def log(self, phase: str, step: int, metrics: Mapping[str, float], samples: Sequence[Row]) -> None:
        """Log the metrics of a step in one transaction, and its table as an artifact."""
        from mlflow.entities import Metric

        if samples:
            table = {name: [sample[name] for sample in samples] for name in COLUMNS}
            self._client.log_table(self._id, table, artifact_file=f"samples/step_{step:06d}.json")
        now = int(self.clock() * 1000)
        batch = [Metric(name, value, now, step) for name, value in metrics.items()]
        batch.sort(key=lambda metric: metric.key == f"{phase}/lineage")  # last: by it a resume knows the step as whole
        for start in range(0, len(batch), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=batch[start : start + _MOST_METRICS])

    def finish(self, run: TrackedRun, model: Path | None) -> None:
        """Log the model, or a reference to it, and end the run there."""
        if model is not None and self.options.weights:
            self._client.log_artifacts(self._id, str(model), artifact_path="model")
        elif model is not None:
            self._client.set_tag(self._id, "model", model.resolve().as_uri())
        self._client.set_terminated(self._id, status="FINISHED" if model is not None else "FAILED")
