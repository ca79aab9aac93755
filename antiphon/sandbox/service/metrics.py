"""Counts and durations, in the text that Prometheus reads (exposition format 0.0.4)."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Metrics:
    """What has happened since the process began."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[tuple[tuple[str, str], ...]]] = {}
        self._durations: dict[
            str, Counter[int]
        ] = {}  # number of durations by the index of the first bound they are within
        self._sums: Counter[str] = Counter()

    def count(self, name: str, **labels: str) -> None:
        """Count one more."""
        self._counts.setdefault(name, Counter())[tuple(labels.items())] += 1

    def total(self, name: str) -> int:
        """How many have been counted, whatever their labels."""
        return sum(self._counts.get(name, {}).values())

    def observe(self, name: str, seconds: float) -> None:
        """Note a duration."""
        self._durations.setdefault(name, Counter())[bisect_left(BOUNDS, seconds)] += 1
        self._sums[name] += seconds  # type: ignore[assignment]  # a Counter adds floats as well

    def text(self, gauges: Mapping[str, Mapping[str, float]]) -> str:
        """All of it, and `gauges`: name -> label `state` -> value; no state for a gauge without label."""
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
    inside = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""
