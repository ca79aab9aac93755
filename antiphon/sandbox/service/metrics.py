"""Counters and histograms in the text format of Prometheus (exposition format 0.0.4)."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Metrics:
    """Counts and durations since the process began."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[tuple[tuple[str, str], ...]]] = {}
        self._durations: dict[str, Counter[int]] = {}  # for each name, how many fell under each bound, by its index
        self._sums: Counter[str] = Counter()

    def count(self, name: str, **labels: str) -> None:
        """Add one to a counter."""
        self._counts.setdefault(name, Counter())[tuple(labels.items())] += 1

    def total(self, name: str) -> int:
        """Return a counter's sum over all labels."""
        return sum(self._counts.get(name, {}).values())

    def observe(self, name: str, seconds: float) -> None:
        """Add a duration to a histogram."""
        self._durations.setdefault(name, Counter())[bisect_left(BOUNDS, seconds)] += 1
        self._sums[name] += seconds  # type: ignore[assignment]  # a Counter adds floats as well

    def text(self, gauges: Mapping[str, Mapping[str, float]]) -> str:
        """Return all metrics as text.

        Args:
            gauges: Current values, as name -> value of the label `state` -> value; the empty state stands for no label.
        """
        return "".join(f"{line}\n" for line in self._lines(gauges))

    def _lines(self, gauges: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
        for name, values in sorted(gauges.items()):
            yield f"# TYPE {name} gauge"
            for state, value in values.items():
                yield f"{name}{_labels({'state': state} if state else {})} {value:g}"
        for name, counts in sorted(self._counts.items()):
            yield f"# TYPE {name}_total counter"
            for labels, number in sorted(counts.items()):
                yield f"{name}_total{_labels(dict(labels))} {number}"
        for name, buckets in sorted(self._durations.items()):
            yield f"# TYPE {name} histogram"
            below = 0
            for index, bound in enumerate(BOUNDS):
                below += buckets[index]
                yield f'{name}_bucket{{le="{bound:g}"}} {below}'
            number = buckets.total()
            yield f'{name}_bucket{{le="+Inf"}} {number}'
            yield f"{name}_sum {self._sums[name]:.6f}"
            yield f"{name}_count {number}"


def _labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""
