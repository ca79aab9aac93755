"""The metrics of a run as arrays, read once and then followed as the file grows, in bounded memory."""

import itertools
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from antiphon.record import safe_files

Curve = npt.NDArray[np.float64]
MOST_LINE = 1 << 20  # bytes of one step
MOST_METRICS = 1_000
MOST_STEPS = 16_384  # rows in memory; of a longer run every second step is kept, and so on
MOST_BYTES = 160 << 20  # of all runs whose metrics stay in memory
SECONDS = "step/seconds"


class MetricTable:
    """One row a step, one column a metric. A step that was undone and repeated has the last row."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.lineages: list[int] = []
        self._columns: dict[str, int] = {}
        self._values = np.full((64, 16), np.nan)
        self._stride = 1

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def nbytes(self) -> int:
        """Size of the values in memory, in bytes."""
        return self._values.nbytes

    @property
    def names(self) -> list[str]:
        """Names of the metrics, sorted."""
        return sorted(self._columns)

    def add(self, step: int, lineage: int, metrics: dict[str, Any]) -> None:
        """Add the metrics of a step, and forget later steps, which a resume has undone."""
        if self.steps and step <= self.steps[-1]:
            keep = bisect_left(self.steps, step)
            self._values[keep : len(self.steps)] = np.nan
            del self.steps[keep:], self.lineages[keep:]
        if step % self._stride:
            return
        if len(self.steps) == MOST_STEPS:
            self._halve()
        row = len(self.steps)
        self.steps.append(step)
        self.lineages.append(lineage)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        for name in numbers:
            if len(self._columns) < MOST_METRICS:
                self._columns.setdefault(name[:200], len(self._columns))
        self._grow(row + 1, len(self._columns))
        known = [
            (column, value) for name, value in numbers.items() if (column := self._columns.get(name[:200])) is not None
        ]
        self._values[row, [column for column, _ in known]] = [value for _, value in known]

    def column(self, name: str) -> Curve:
        """Return a metric, [steps]; NaN where a step does not have it."""
        if name not in self._columns:
            return np.full(len(self.steps), np.nan)
        return np.array(self._values[: len(self.steps), self._columns[name]])

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric; None if there is none."""
        values = self.column(name)
        known = values[np.isfinite(values)]
        return float(known[-1]) if len(known) else None

    def match(self, pattern: str) -> list[str]:
        """Return the metrics with a name; `*` in it stands for one part between slashes."""
        if "*" not in pattern:
            return [pattern] if pattern in self._columns else []
        parts = pattern.split("/")
        split = [(name, name.split("/")) for name in self.names]
        return [
            name
            for name, found in split
            if len(found) == len(parts) and all(one in ("*", other) for one, other in zip(parts, found, strict=True))
        ]

    def seconds(self) -> Curve:
        """Return the seconds from the first step's begin to each step's end, [steps]."""
        return np.cumsum(np.nan_to_num(self.column(SECONDS))) * self._stride

    def _grow(self, rows: int, columns: int) -> None:
        have_rows, have_columns = self._values.shape
        if rows > have_rows or columns > have_columns:
            larger = np.full((_enlarge(have_rows, rows), _enlarge(have_columns, columns)), np.nan)
            larger[:have_rows, :have_columns] = self._values
            self._values = larger

    def _halve(self) -> None:
        self._stride *= 2
        keep = [row for row, step in enumerate(self.steps) if step % self._stride == 0]
        self._values[: len(keep)] = self._values[keep]
        self._values[len(keep) :] = np.nan
        self.steps = [self.steps[row] for row in keep]
        self.lineages = [self.lineages[row] for row in keep]


def _enlarge(have: int, need: int) -> int:
    return have if need <= have else max(need, have * 2)


class Metrics:
    """The tables of one run: training steps, and those of supervised fine-tuning, which are counted apart."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.training, self.supervised = MetricTable(), MetricTable()
        self.damaged = 0  # lines that are no step
        self._offset = 0
        self._file = (0, 0)  # device and inode
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Size of both tables in memory, in bytes."""
        return self.training.nbytes + self.supervised.nbytes

    def follow(self) -> None:
        """Read the lines that were added since the last time; from the beginning if the file was replaced."""
        path = self.run / "metrics.jsonl"
        with self._lock, safe_files.convert_read_errors(path):
            try:
                stat = path.stat()
            except OSError:
                return
            file_id = (stat.st_dev, stat.st_ino)
            if file_id == self._file and stat.st_size == self._offset:
                return
            if file_id != self._file or stat.st_size < self._offset:
                self.training, self.supervised, self.damaged = MetricTable(), MetricTable(), 0
                self._offset, self._file = 0, file_id
            with safe_files.resolve_file(self.run, path.name).open("rb") as file:
                self._read(file)

    def _read(self, file: BinaryIO) -> None:
        file.seek(self._offset)
        while line := file.readline(MOST_LINE):
            if not line.endswith(b"\n") and len(line) < MOST_LINE:
                break  # a live run is at its last line
            self._offset += len(line)
            self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            values = msgspec.json.decode(line)
            is_supervised = "sft_step" in values or any(name.startswith("sft/") for name in values)
            step, lineage = int(values.pop("sft_step", values.get("step"))), int(values.pop("lineage", 0))
            values.pop("step", None)
        except (ValueError, TypeError, AttributeError, RecursionError):
            self.damaged += 1
            return
        (self.supervised if is_supervised else self.training).add(step, lineage, values)


class MetricsCache:
    """The metrics of the runs that were asked for last."""

    def __init__(self) -> None:
        self._runs: OrderedDict[Path, Metrics] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, run: Path) -> Metrics:
        """Return the metrics of a run as they are on disk now."""
        with self._lock:
            if run not in self._runs:
                self._runs[run] = Metrics(run)
            self._runs.move_to_end(run)
            metrics = self._runs[run]
        metrics.follow()
        with self._lock:
            while len(self._runs) > 1 and sum(each.nbytes for each in self._runs.values()) > MOST_BYTES:
                self._runs.popitem(last=False)
        return metrics


def downsample(x: Curve, y: Curve, points: int) -> tuple[list[float], list[float]]:
    """Return a curve in at most about `points` points: the least and the greatest of each interval, so that spikes stay.

    Args:
        x: Ascending places, [N].
        y: Values, [N]; those that are not finite are left out.
        points: Number of points.
    """
    known = np.isfinite(y) & np.isfinite(x)
    x, y = x[known], y[known]
    if len(y) <= points:
        return x.tolist(), y.tolist()
    edges = np.linspace(0, len(y), max(points // 2, 1) + 1).astype(int)
    kept: list[int] = []
    for start, stop in itertools.pairwise(edges.tolist()):
        part = y[start:stop]
        kept += sorted({start + int(part.argmin()), start + int(part.argmax())})
    return x[kept].tolist(), y[kept].tolist()


def rolling_mean(y: Curve, window: int) -> Curve:
    """Return the mean over the last `window` known values, [N]; values that are not finite do not count."""
    known = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    start = np.maximum(np.arange(len(y)) + 1 - window, 0)
    stop = np.arange(len(y)) + 1
    with np.errstate(invalid="ignore"):
        return np.where(known, (sums[stop] - sums[start]) / (counts[stop] - counts[start]), np.nan)


def read_sparkline(values: Curve, points: int = 40) -> list[float]:
    """Return the means of at most `points` intervals of a curve."""
    known = values[np.isfinite(values)]
    if len(known) <= points:
        return [float(each) for each in known]
    return [float(part.mean()) for part in np.array_split(known, points)]


def average_seeds(x: Sequence[Curve], y: Sequence[Curve], points: int) -> dict[str, list[float]]:
    """Return mean, least and greatest of several curves where all of them are known.

    Args:
        x: Ascending places of each curve, [N] each.
        y: Values of each curve, [N] each.
        points: Number of places.
    """
    curves = [(px[np.isfinite(py)], py[np.isfinite(py)]) for px, py in zip(x, y, strict=True)]
    curves = [(px, py) for px, py in curves if len(px)]
    if not curves:
        return {"x": [], "mean": [], "low": [], "high": []}
    low, high = max(px[0] for px, _ in curves), min(px[-1] for px, _ in curves)
    if high < low:
        return {"x": [], "mean": [], "low": [], "high": []}
    longest = max(curves, key=lambda each: len(each[0]))[0]
    inside = longest[(longest >= low) & (longest <= high)]
    grid = inside if len(inside) <= points else np.linspace(low, high, points)
    values = np.stack([np.interp(grid, px, py) for px, py in curves])
    return {
        "x": grid.tolist(),
        "mean": values.mean(0).tolist(),
        "low": values.min(0).tolist(),
        "high": values.max(0).tolist(),
    }
