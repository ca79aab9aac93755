"""Colours of tokens by a recorded quantity: ten levels, which the style sheet paints."""

from dataclasses import dataclass, field

import numpy as np

from antiphon.core.types import Segment
from antiphon.dashboard.curves import Curve

LEVELS = 10
SURPRISE = np.array([0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])  # bounds of the levels of a negative log-prob
NAMES = {"logprob": "log-prob", "version": "version", "mixed_cache": "mixed cache"}


@dataclass(frozen=True, slots=True)
class Legend:
    """One level of colour and the values that it stands for."""

    level: int
    label: str


@dataclass(frozen=True, slots=True)
class Coloring:
    """The values that are coloured, NaN where there is none, and their levels.

    Attributes:
        values: Values, [L].
        levels: Levels 0 to 9, [L]; -1 where there is none.
        legend: The levels that occur.
    """

    values: Curve
    levels: np.ndarray
    legend: list[Legend] = field(default_factory=list)

    def level(self, place: int) -> int | None:
        """Return the level of a token; None if it has none."""
        found = int(self.levels[place])
        return None if found < 0 else found


def list_colorings(segment: Segment) -> list[str]:
    """Return what the tokens of a segment can be coloured by: log-prob, version, and each recorded stream of numbers."""
    streams = [spec.name for spec in segment.streams if not spec.shape and np.dtype(spec.dtype).kind in "fiub"]
    return ["logprob", "version", *sorted(streams)]


def make_coloring(segment: Segment, name: str) -> Coloring | None:
    """Return the colours of a segment's tokens by one quantity; None without one."""
    sampled = np.asarray(segment.loss_mask, bool)
    if name == "logprob":
        values = np.where(sampled, segment.logprobs, np.nan).astype(np.float64)
        levels = np.where(np.isfinite(values), np.searchsorted(SURPRISE, -np.nan_to_num(values)), -1)
        bounds = [0.0, *SURPRISE.tolist()]
        labels = {level: f"−{bound:g}" if level else "0" for level, bound in enumerate(bounds)}
        return Coloring(values, levels, _legend(levels, labels))
    if name == "version":
        values = np.where(sampled, segment.versions, np.nan).astype(np.float64)
        known = sorted(set(values[np.isfinite(values)].tolist()))
        place = {version: number for number, version in enumerate(known)}
        spread = max(len(known) - 1, LEVELS - 1)
        levels = np.array([place[v] * (LEVELS - 1) // spread if np.isfinite(v) else -1 for v in values.tolist()], int)
        labels = {}
        for version, number in place.items():
            labels.setdefault(number * (LEVELS - 1) // spread, f"version {int(version)}")
        return Coloring(values, levels, _legend(levels, labels))
    found = next((segment.streams[spec] for spec in segment.streams if spec.name == name), None)
    if found is None:
        return None
    return _color_stream(np.asarray(found, np.float64))


def _color_stream(values: Curve) -> Coloring:
    """Spread the levels evenly between the least and the greatest value."""
    known = values[np.isfinite(values)]
    if not len(known):
        return Coloring(values, np.full(len(values), -1))
    low, high = float(known.min()), float(known.max())
    scaled = (np.nan_to_num(values) - low) / ((high - low) or 1.0)
    levels = np.where(np.isfinite(values), np.clip((scaled * LEVELS).astype(int), 0, LEVELS - 1), -1)
    labels = {level: f"{low + (high - low) * level / LEVELS:.3g}" for level in range(LEVELS)}
    return Coloring(values, levels, _legend(levels, labels))


def _legend(levels: np.ndarray, labels: dict[int, str]) -> list[Legend]:
    return [Legend(level, labels.get(level, "")) for level in sorted({int(each) for each in levels} - {-1})]
