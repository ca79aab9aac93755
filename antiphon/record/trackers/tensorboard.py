"""TensorBoard: event files in the run directory."""

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


class TensorBoardTracker(RunTracker):
    """Writes one scalar a metric; tables and the configuration become texts.

    A resume purges the steps that it undoes: TensorBoard shows the new ones alone.
    """

    def __init__(self, directory: Path, clock: Clock, options: Any = None) -> None:
        super().__init__(directory, clock, options)
        check_installed("tensorboard", "tensorboard")
        self._writer: Any = None

    def start(self, run: TrackedRun) -> LastSteps:
        """Begin an event file; what an earlier one has after the last step that is known to be in it is purged."""
        # tensorboard's own writer, which takes 0.3 s to import; torch's wrapper of it takes 6.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        state = self.read_state()
        last = {SFT: state.get(SFT, 0), TRAIN: state.get(TRAIN, 0)}
        if run.lineage:
            last[TRAIN] = min(last[TRAIN], run.cut)
        self._writer = EventFileWriter(str(self.directory))
        if state:
            self._purge(last[TRAIN] + 1)
            last[SFT] = min(last[SFT], last[TRAIN])  # readers drop the later steps of both phases
        else:
            self.write_state(**last)
            self._add_text(0, "config", f"```yaml\n{dump_yaml(dict(run.config))}\n```")
        return last

    def _purge(self, step: int) -> None:
        """Make readers drop the events of earlier files from a step on."""
        from tensorboard.compat.proto import event_pb2

        session: Any = event_pb2.SessionLog
        self._add(step, session_log=session(status=session.START))

    def log(self, phase: str, step: int, metrics: Mapping[str, float], samples: Sequence[Row]) -> None:
        """Write one event with all metrics of a step."""
        from tensorboard.compat.proto import summary_pb2

        summary: Any = summary_pb2.Summary
        values = [summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=summary(value=values))
        if samples:
            self._add_text(step, "samples", sample_table(samples))
        self._writer.flush()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        event: Any = event_pb2.Event
        self._writer.add_event(event(wall_time=self.clock(), step=step, **content))

    def _add_text(self, step: int, name: str, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(step, summary=text_pb(name, text))

    def finish(self, run: TrackedRun, model: Path | None) -> None:
        """Close the event file."""
        if model is not None:
            self._add_text(0, "model", str(model.resolve()))
        self.abandon()

    def abandon(self) -> None:
        """Close the event file, if one is open."""
        if self._writer is not None:
            self._writer.close()
