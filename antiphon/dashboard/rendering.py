"""Templates in which every value is made harmless: escaped, without control characters, and bounded."""

import math
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
from markupsafe import Markup

from antiphon.dashboard.cards import KINDS
from antiphon.dashboard.coloring import LABELS
from antiphon.dashboard.params import Params

HERE = Path(__file__).parent
MOST_TEXT = 100_000  # characters of one value
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # control, format (bidirectional overrides), surrogates, unassigned
JOINERS = "\u200c\u200d"  # many scripts and emoji need them
PICTURES = 0x2400  # of the control characters


def clean(text: str, keep: str = "\n\t") -> str:
    """Return a text as a page may show it: invisible characters become visible, and a long text is cut."""
    if len(text) > MOST_TEXT:
        text = f"{text[:MOST_TEXT]}… ({len(text) - MOST_TEXT:,} more characters)"
    if text.isascii() and text.isprintable():
        return text
    return "".join(_show(each) if each not in keep and each not in JOINERS else each for each in text)


def _show(character: str) -> str:
    if unicodedata.category(character) not in HIDDEN:
        return character
    code = ord(character)
    if code < 0x20:
        return chr(PICTURES + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def _finalize(value: Any) -> Any:
    if isinstance(value, Markup):
        return value
    if value is None:
        return "–"
    return clean(value) if isinstance(value, str) else value


def number(value: float | None, form: str = "number") -> str:
    """Return a number as tables show it; a dash if there is none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if form == "percent":
        return f"{value:.1%}"
    if form == "signed":
        return f"{value:+.3g}".replace("-", "−")
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", "−")
    if form == "small" and abs(value) < 0.001:
        return f"{value:.2e}".replace("-", "−")
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}".replace("-", "−")


def duration(seconds: float | None) -> str:
    """Return a duration in its two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s" if 0 < abs(seconds) < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def ago(moment: str) -> str:
    """Return how long ago a moment in ISO 8601 was."""
    try:
        seconds = (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    except (ValueError, TypeError):
        return "–"
    if seconds < 60:
        return "just now"
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def spark(values: list[float], width: int = 96, height: int = 22) -> Markup:
    """Return a small curve as SVG; empty if there are fewer than two values."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return Markup("")
    low, span = min(known), (max(known) - min(known)) or 1.0
    points = " ".join(
        f"{1 + place * (width - 2) / (len(known) - 1):.1f},{height - 2 - (value - low) / span * (height - 4):.1f}"
        for place, value in enumerate(known)
    )
    return Markup(
        '<svg class="spark" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">'
        '<polyline points="{points}"/></svg>'
    ).format(w=width, h=height, points=points, label=f"from {number(known[0])} to {number(known[-1])}")


def area(values: list[float], places: list[float], base: float, height: float) -> str:
    """Return the corners of an area below a curve for a polygon of SVG; the greatest value reaches `height` above `base`.

    Args:
        values: Values that are not negative, [N].
        places: Their horizontal places, ascending, [N].
        base: Vertical place of 0.
        height: Height of the greatest value.
    """
    scale = height / max([*values, 1e-9])
    corners = " ".join(f"{x:.1f},{base - scale * y:.1f}" for x, y in zip(places, values, strict=True))
    return f"{places[0]:.1f},{base:g} {corners} {places[-1]:.1f},{base:g}" if places else ""


class Templates:
    """The templates of the dashboard, with links below the proxy's prefix."""

    def __init__(self, prefix: str, version: str, *, is_bundle: bool = False) -> None:
        self._prefix = prefix
        self._env = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            finalize=_finalize,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._env.globals.update(url=self.url, version=version, is_bundle=is_bundle)
        self._env.filters.update(number=number, duration=duration, ago=ago, spark=spark, area=area)
        self._env.filters["kind"] = lambda kind: KINDS[kind]
        self._env.filters["coloring"] = lambda name: LABELS.get(name, name.replace("_", " "))

    def url(self, path: str, name: str = "", query: str = "", **params: object) -> str:
        """Return the address of a page.

        Args:
            path: Path of the page, such as `/run/`.
            name: Name of a run, appended to it.
            query: Parameters that are encoded already.
            params: Further parameters; None and empty ones are left out.
        """
        given = [(key, value) for key, value in params.items() if value is not None and value != ""]
        rest = "&".join(part for part in (query, urlencode(given, errors="replace")) if part)
        return self._prefix + path + quote(name, errors="replace") + (f"?{rest}" if rest else "")

    def render(self, template: str, params: Params, context: Mapping[str, Any]) -> str:
        """Return a page."""
        return self._env.get_template(template).render(params=params, **context)
