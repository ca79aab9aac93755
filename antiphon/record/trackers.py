"""Trackers: destinations of metrics besides `metrics.jsonl`. None of them imports torch."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from antiphon.core.errors import ConfigError
from antiphon.core.registry import Registry

Clock = Callable[[], float]


class Tracker(Protocol):
    """Receives the reduced metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of `step`."""

    def close(self) -> None:
        """Write what is buffered."""


class TensorBoardTracker:
    """Writes event files for TensorBoard, one scalar a metric. `clock` returns the wall time in seconds since 1970."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        # tensorboard's own writer, which takes 0.3 s to import; torch's wrapper of it takes 6.
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            message = "'tensorboard' is not installed: pip install 'antiphon[tensorboard]'"
            raise ConfigError(message, key="record.trackers", value="tensorboard") from error
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._writer: Any = EventFileWriter(str(directory))
        self._clock = clock

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all metrics of `step`."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=self._clock(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


TRACKERS = Registry("tracker", {"tensorboard": "antiphon.record.trackers:TensorBoardTracker"})


def open_trackers(names: Iterable[str], run: Path, clock: Clock) -> list[Tracker]:
    """Open trackers by name, each with its own folder `<run>/<name>`."""
    return [TRACKERS.resolve(name)(run / name.replace(":", "."), clock) for name in names]
