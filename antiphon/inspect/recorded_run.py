"""A run directory as an object: what happened in a run that has ended, or that is still running."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.core.errors import RecordError
from antiphon.inspect.audit import Audit, audit
from antiphon.inspect.samples import RecordedSample, iterate_samples
from antiphon.inspect.why import why
from antiphon.record import safe_files
from antiphon.record.metrics_table import plot_metric, read_metrics_table
from antiphon.record.notes import Notes, read_notes, write_notes
from antiphon.record.reader import AttemptRow, BranchPoint, RunReader

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


def open_run(directory: str | Path) -> "RecordedRun":
    """Return the run in a directory, to look at; raise `RecordError` if there is none."""
    path = Path(directory)
    safe_files.resolve_file(path, "config.yaml")
    return RecordedRun(path)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run directory. Each call reads what is there now; nothing that the directory names is imported or run."""

    directory: Path

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration as plain values."""
        return safe_files.read_config(self.directory)

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of `summary.json`; empty if the run has not ended by itself."""
        if not (self.directory / "summary.json").exists():
            return {}
        found = safe_files.read_json(self.directory, "summary.json")
        if not isinstance(found, dict):
            path = self.directory / "summary.json"
            raise RecordError(f"{path} holds {type(found).__name__}, expected an object", path=path)
        return found

    @property
    def branch_point(self) -> BranchPoint | None:
        """The checkpoint of another run that the run begins at; None if it begins at its model."""
        with RunReader.open(self.directory) as reader:
            return reader.find_branch_point()

    @property
    def notes(self) -> Notes:
        """Tags of the run and the note about it."""
        return read_notes(self.directory)

    def write_notes(self, tags: Iterable[str], text: str) -> None:
        """Replace tags and note, which are in `notes.json`; nothing else in the directory changes."""
        write_notes(self.directory, tags, text)

    def metrics(self) -> "pandas.DataFrame":
        """Return the metrics of all steps that were not undone, a row a step; needs pandas."""
        return read_metrics_table(self.directory)

    def plot(self, metric: str = "reward/mean") -> "Axes":
        """Draw a metric over the steps; needs matplotlib."""
        return plot_metric(self.directory, metric)

    def attempts(self, status: str = "") -> list[AttemptRow]:
        """Return all attempts, or those with one status, such as `trained`; `pandas.DataFrame` takes the list."""
        with RunReader.open(self.directory) as reader:
            return list(reader.iterate_attempts(status))

    def rollouts(
        self, *, step: int | None = None, status: str = "", containing: str = "", order: str = "newest"
    ) -> Iterator[RecordedSample]:
        """Yield recorded attempts as text, with tokens and scores.

        Args:
            step: Only those that this training step trained on.
            status: Only those with this status, such as `filtered`.
            containing: Only those whose conversation contains this text.
            order: `newest`, `best` or `worst` first.
        """
        return iterate_samples(self.directory, step=step, status=status, containing=containing, order=order)

    def why(self, attempt: str | AttemptRow) -> list[tuple[str, str]]:
        """Return what is recorded of an attempt, or of a token of it, as labels and texts; see `antiphon why`."""
        return list(why(self.directory, attempt if isinstance(attempt, str) else attempt.name))

    def audit(self) -> Audit:
        """Check that every attempt ended once, and that no sample was too old; see `antiphon audit`."""
        return audit(self.directory)
