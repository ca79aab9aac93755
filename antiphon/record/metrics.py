"""Numbers of a run: recorded at any moment, reduced once a step, written as one line of JSON.

How a metric is reduced is declared, or follows from its name: the last word after `/` or `_` being `max`, `min`, `sum`
(or `total`, `count`) or `last` says it; every other metric is a weighted mean.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from antiphon.record.run_dir import replace_nonfinite

Reduction = Literal["mean", "sum", "max", "min", "last"]
Entry = tuple[float, float]  # value, weight

# Metrics of the loop whose names say something else than their reduction.
DECLARED: Mapping[str, Reduction] = {
    "groups/filtered": "sum",
    "engines/live": "last",
    "attempts/dispatched": "last",
    "groups/live": "last",
    "learner/lr": "last",
    "learner/seconds": "sum",
    "learner/tokens": "sum",
    "step/seconds": "sum",
    "tokens/per_second": "last",
    "tokens/requeued": "last",
    "evaluation/accuracy": "last",
}

_BY_NAME: Mapping[str, Reduction] = {
    "max": "max",
    "min": "min",
    "sum": "sum",
    "total": "sum",
    "count": "sum",
    "last": "last",
}


def _mean(entries: Sequence[Entry]) -> float:
    weight = sum(w for _, w in entries)
    # Without weight there is nothing to be the mean of; null in the file tells it from a zero.
    return sum(v * w for v, w in entries) / weight if weight else float("nan")


REDUCE: Mapping[Reduction, Callable[[Sequence[Entry]], float]] = {
    "mean": _mean,
    "sum": lambda entries: sum(v for v, _ in entries),
    "max": lambda entries: max(v for v, _ in entries),
    "min": lambda entries: min(v for v, _ in entries),
    "last": lambda entries: entries[-1][0],
}


def find_reduction(name: str, declared: Mapping[str, Reduction] = DECLARED) -> Reduction:
    """How the metric `name` is reduced over a step."""
    return declared.get(name) or _BY_NAME.get(re.split(r"[/_]", name)[-1], "mean")


class Metrics:
    """Collects metrics between two steps and appends them to `metrics.jsonl`."""

    def __init__(self, path: Path, declared: Mapping[str, Reduction] | None = None, *, lineage: int = 0) -> None:
        """`declared` adds to the reductions that are known, or replaces them. `lineage` stands in every line: of the lines of
        a step that was undone and done again, the last is the one that stands."""
        self._declared = {**DECLARED, **(declared or {})}
        self._entries: dict[str, list[Entry]] = {}
        self._lineage = lineage
        _drop_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def record(self, name: str, value: float, weight: float = 1) -> None:
        """Add a value; `weight` counts in means only, and is not negative."""
        if weight < 0:
            raise ValueError(f"metric {name!r}: weight {weight} is negative")
        self._entries.setdefault(name, []).append((float(value), float(weight)))

    def record_all(self, values: Mapping[str, float], weight: float = 1) -> None:
        """Add several values of equal weight."""
        for name, value in values.items():
            self.record(name, value, weight)

    def flush(self, step: int) -> dict[str, float]:
        """Reduce what was recorded since the last flush, append it as the line of `step`, and return it."""
        values = {
            name: REDUCE[find_reduction(name, self._declared)](entries)
            for name, entries in sorted(self._entries.items())
        }
        self._entries.clear()
        self._file.write(
            json.dumps({"step": step, "lineage": self._lineage, **replace_nonfinite(values)}, allow_nan=False) + "\n"
        )
        self._file.flush()
        return values

    def close(self) -> None:
        """Close the file; what was not flushed is dropped."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop_torn_line(path: Path) -> None:
    """Cut off the unfinished last line that a killed process may have left, so that the next one does not join it."""
    if path.exists():
        with path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
