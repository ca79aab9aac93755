"""Colours of tokens by a recorded quantity: ten levels, which the style sheet paints."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from antiphon.core.types import Segment
from antiphon.dashboard.curves import Curve

LEVELS = 10
SURPRISE = np.array([0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])  # bounds of the levels of a negative log-prob
SIGNED = {"advantage": 0.0, "log_ratio": 0.01}  # colours begin at 0, in two directions; least value of the full colour
FAINTEST = 0.01  # of the full colour's value; what is nearer to 0 has no colour
LABELS = {
    "logprob": "log-prob",
    "mixed_cache": "mixed cache",
    "log_ratio": "log importance ratio",
    "waad": "WAAD",
    "fai": "FAI",
}  # of colourings whose names are no words


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
        signed: True if levels 0 to 4 are below 0, the least first, and levels 5 to 9 above.
    """

    values: Curve
    levels: np.ndarray
    legend: list[Legend] = field(default_factory=list)
    signed: bool = False

    def level(self, place: int) -> int | None:
        """Return the level of a token; None if it has none."""
        found = int(self.levels[place])
        return None if found < 0 else found


def list_colorings(segment: Segment, stats: Mapping[str, Curve]) -> list[str]:
    """Return what the tokens of a segment can be coloured by: log-prob, version, and all that was recorded of them.

    Args:
        segment: The segment, with the streams of engines.
        stats: Numbers of a step by name, [L] each.
    """
    streams = [spec.name for spec in segment.streams if not spec.shape and np.dtype(spec.dtype).kind in "fiub"]
    return ["logprob", "version", *stats, *sorted(set(streams) - set(stats))]


def make_coloring(segment: Segment, stats: Mapping[str, Curve], name: str) -> Coloring | None:
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
    if name in stats and len(stats[name]) == len(segment.tokens):
        values = stats[name]
        return _color_signed(values, SIGNED[name]) if name in SIGNED else _color_stream(values)
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


def _color_signed(values: Curve, least: float) -> Coloring:
    """Spread the levels evenly on both sides of 0, up to the greatest value or `least`: noise is not to look like a signal."""
    known = np.nan_to_num(values)
    most, half = max(float(np.abs(known).max(initial=0.0)), least) or 1.0, LEVELS // 2
    known = np.where(np.abs(known) < FAINTEST * most, 0.0, known)
    sizes = np.minimum((np.abs(known) / most * half).astype(int), half - 1)
    levels = np.where(known > 0, half + sizes, np.where(known < 0, half - 1 - sizes, -1))
    bounds = [most * size / half for size in range(half)]
    labels = {half + size: f"+{bound:.2g}" for size, bound in enumerate(bounds)}
    labels |= {half - 1 - size: f"−{bound:.2g}" for size, bound in enumerate(bounds)}
    return Coloring(values, levels, _legend(levels, labels), signed=True)


def _legend(levels: np.ndarray, labels: dict[int, str]) -> list[Legend]:
    return [Legend(level, labels.get(level, "")) for level in sorted({int(each) for each in levels} - {-1})]
