"""The interface of trackers: destinations of a run's history besides its own directory. None of them imports torch."""

import importlib.util
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from antiphon.core.config import read_yaml
from antiphon.core.errors import ConfigError
from antiphon.record.checkpoint import MANIFEST, list_checkpoints
from antiphon.record.run_dir import RunDirectory, write_json

Clock = Callable[[], float]  # seconds since 1970
Row = Mapping[str, Any]  # of a table of sample rollouts
LastSteps = Mapping[str, int]  # by phase

SFT = "sft"  # supervised fine-tuning before or instead of reinforcement learning; it counts its own steps
TRAIN = "train"

COLUMNS = ("attempt", "prompt", "completion", "reward", "advantage", "outcome")


class Tracker(Protocol):
    """Receives the reduced metrics of each step. The constructor takes the tracker's folder and a clock."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of `step`."""

    def close(self) -> None:
        """Write what is buffered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run that a tracker follows.

    Attributes:
        name: Name of the run.
        directory: Its directory.
        lineage: The lineage that is recorded now; 0 unless the run was resumed.
        cut: Step after which it was resumed; later steps of earlier lineages are undone.
    """

    name: str
    directory: RunDirectory
    lineage: int = 0
    cut: int = 0

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration in its directory, as plain values."""
        found: Mapping[str, Any] = read_yaml(self.directory.config)
        return found

    def find_model(self) -> Path | None:
        """Return the model of a run that has ended well: an offline command's, or the newest checkpoint."""
        if not self.directory.summary.is_file():
            return None
        trained = self.directory.path / "model"
        whole = [trained] if (trained / MANIFEST).is_file() else list_checkpoints(self.directory.checkpoints)
        return whole[-1] if whole else None


class RunTracker:
    """A tracker that receives the whole run: configuration, metrics, tables of samples, and the trained model.

    Every call but the constructor comes from one thread of the tracker's own. What raises is reported, and the tracker
    starts again: training goes on.
    """

    def __init__(self, directory: Path, clock: Clock, options: Any = None) -> None:
        """Prepare to write.

        Args:
            directory: Folder of the tracker in the run directory.
            clock: Returns the time.
            options: The tracker's section of the configuration.
        """
        self.directory = directory
        self.clock = clock
        self.options = options

    def start(self, run: TrackedRun) -> LastSteps:
        """Open the run there, or open it again; return the last step of each phase that need not be logged again."""
        raise NotImplementedError

    def log(self, phase: str, step: int, metrics: Mapping[str, float], samples: Sequence[Row]) -> None:
        """Receive the metrics of a step, and a table of its sample rollouts, which is mostly empty."""
        raise NotImplementedError

    def finish(self, run: TrackedRun, model: Path | None) -> None:
        """Receive the trained model, which is None unless the run ended well, and close the run there."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Release what a tracker that failed holds, before it starts again."""

    # --- the identity of the run ------------------------------------------------------------------------------------

    def run_id(self) -> str:
        """Return the id of the run there, which is kept in the tracker's folder; make one if there is none."""
        return self.read_state().get("id") or self.write_state(id=uuid.uuid4().hex[:12])["id"]

    def read_state(self) -> dict[str, Any]:
        """Return what `write_state` has kept."""
        file = self.directory / "run.json"
        state: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
        return state

    def write_state(self, **changes: Any) -> dict[str, Any]:
        """Keep values in `run.json` in the tracker's folder, and return all of them."""
        self.directory.mkdir(parents=True, exist_ok=True)
        state = self.read_state() | changes
        write_json(self.directory / "run.json", state)
        return state


def check_installed(tracker: str, *modules: str) -> None:
    """Raise `ConfigError` that names the extra, unless the modules of a tracker are installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            message = f"{module!r} is not installed: pip install 'antiphon[{tracker}]'"
            raise ConfigError(message, key="record.trackers", value=tracker)


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a configuration by dotted key; a list is a leaf."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flatten_config(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def sample_table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table, for trackers that have text and no tables."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
