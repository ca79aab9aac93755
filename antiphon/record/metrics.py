"""Metrics of a run: recorded at any time, reduced once a step, and written as one line of JSON.

The reduction of a metric is declared, or follows from the last word of its name after `/` or `_`: `max`, `min`, `sum` (also
`total`, `count`) or `last`. Every other metric is a weighted mean.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from antiphon.record.run_dir import remove_partial_line, replace_nonfinite

Reduction = Literal["mean", "sum", "max", "min", "last"]
Entry = tuple[float, float]  # value, weight

# Metrics of the loop whose names do not say their reduction.
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
    # Without weight there is no mean; it becomes null in the file, unlike a zero.
    return sum(v * w for v, w in entries) / weight if weight else float("nan")


REDUCE: Mapping[Reduction, Callable[[Sequence[Entry]], float]] = {
    "mean": _mean,
    "sum": lambda entries: sum(v for v, _ in entries),
    "max": lambda entries: max(v for v, _ in entries),
    "min": lambda entries: min(v for v, _ in entries),
    "last": lambda entries: entries[-1][0],
}


def find_reduction(name: str, declared: Mapping[str, Reduction] = DECLARED) -> Reduction:
    """Return the reduction of a metric over a step."""
    return declared.get(name) or _BY_NAME.get(re.split(r"[/_]", name)[-1], "mean")


class Metrics:
    """Collects metrics between two steps and appends them to `metrics.jsonl`."""

    def __init__(self, path: Path, declared: Mapping[str, Reduction] | None = None, *, lineage: int = 0) -> None:
        """Append to a file.

        Args:
            path: The file.
            declared: Reductions besides `DECLARED`, which they override.
            lineage: Written to every line. Of several lines of one step, which was undone and done again, the last is valid.
        """
        self._declared = {**DECLARED, **(declared or {})}
        self._entries: dict[str, list[Entry]] = {}
        self._lineage = lineage
        remove_partial_line(path)
        self._file = path.open("a", encoding="utf-8")

    def record(self, name: str, value: float, weight: float = 1) -> None:
        """Add a value; `weight` counts only in means and must not be negative."""
        if weight < 0:
            raise ValueError(f"metric {name!r}: weight {weight} is negative")
        self._entries.setdefault(name, []).append((float(value), float(weight)))

    def record_all(self, values: Mapping[str, float], weight: float = 1) -> None:
        """Add several values of equal weight."""
        for name, value in values.items():
            self.record(name, value, weight)

    def flush(self, step: int, counter: str = "step") -> dict[str, float]:
        """Reduce the values since the last flush, append them as the line of `step`, and return them.

        Args:
            step: Number of the step.
            counter: Key of the number: `step`, or `sft_step` for supervised fine-tuning, which counts its own steps.
        """
        values = {
            name: REDUCE[find_reduction(name, self._declared)](entries)
            for name, entries in sorted(self._entries.items())
        }
        self._entries.clear()
        self._file.write(
            json.dumps({counter: step, "lineage": self._lineage, **replace_nonfinite(values)}, allow_nan=False) + "\n"
        )
        self._file.flush()
        return values

    def close(self) -> None:
        """Close the file; values that were not flushed are dropped."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
