"""Charts without a browser: SVG for papers and for pages without JavaScript, and CSV."""

import csv
import io
import math
from html import escape

from antiphon.dashboard.rendering import clean, number
from antiphon.dashboard.views.series import ChartData, Series

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 44
COLORS = ("#2f6f8f", "#c46a3b", "#5b8c5a", "#8a6bb0", "#b58a2a", "#4c9aa8", "#b0567a", "#6f7d8c")
GRAY = "#808a94"
LINE_HEIGHT = 14


def chart_csv(chart: ChartData) -> str:
    """Return the points of a chart as CSV: series, place, value, and the bounds of bands."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(["series", chart.axis, chart.title, "low", "high"])
    for series in chart.series:
        blank = [None] * len(series.x)
        lows, highs = series.low or blank, series.high or blank
        for row in zip(series.x, series.y, lows, highs, strict=True):
            label = clean(series.label)
            # A spreadsheet would run a text that begins like a formula.
            writer.writerow([f"'{label}" if label[:1] in "=+-@" else label, *row])
    return file.getvalue()


def chart_svg(chart: ChartData) -> str:
    """Return a chart as SVG; its colours can be read on light and dark ground."""
    drawn = [series for series in chart.series if series.x]
    lines = [series for series in drawn if series.kind != "faint"]
    height = HEIGHT + max(len(lines) - 1, 0) * LINE_HEIGHT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" font-family="system-ui, sans-serif" font-size="11" fill="{GRAY}"><title>{_text(chart.title)}</title>'
    )
    if not drawn:
        return f'{head}<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no values yet</text></svg>'
    scale = _Scale(drawn, chart.least)
    parts = [*_axes(chart, scale), *(_curve(series, scale) for series in drawn), *_legend(lines)]
    return head + "".join(parts) + "</svg>"


class _Scale:
    """Places of values in the picture."""

    def __init__(self, drawn: list[Series], least: float | None) -> None:
        xs = [x for series in drawn for x in (series.x[0], series.x[-1])]
        ys = [y for series in drawn for y in (*series.y, *series.low, *series.high) if math.isfinite(y)] or [0.0]
        self.left, self.right = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1
        low, high = min(ys) if least is None else min(least, *ys), max(ys)
        self.low, self.high = (low, high) if high > low else (low - 0.5, high + 0.5)

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def _axes(chart: ChartData, scale: _Scale) -> list[str]:
    found = []
    for value in ticks(scale.low, scale.high, 5):
        y = scale.y(value)
        found.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRAY}" stroke-opacity=".2"/>'
        )
        found.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_text(number(value, chart.form))}</text>'
        )
    for value in ticks(scale.left, scale.right, 6):
        found.append(f'<text x="{scale.x(value):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{value:g}</text>')
    unit = "seconds" if chart.axis == "time" else chart.axis
    return [*found, f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 14}" text-anchor="end">{unit}</text>']


def _curve(series: Series, scale: _Scale) -> str:
    color = COLORS[series.color % len(COLORS)]
    points = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in zip(series.x, series.y, strict=True))
    opacity, width = (".3", 1) if series.kind == "faint" else ("1", 1.6)
    line = (
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}"/>'
    )
    if series.kind != "band":
        return line
    upper = [f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in zip(series.x, series.high, strict=True)]
    lower = [f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in zip(series.x, series.low, strict=True)]
    band = " ".join([*upper, *reversed(lower)])
    return f'<polygon points="{band}" fill="{color}" fill-opacity=".15"/>{line}'


def _legend(lines: list[Series]) -> list[str]:
    found = []
    for place, series in enumerate(lines):
        y = HEIGHT - 14 + place * LINE_HEIGHT
        found.append(
            f'<rect x="{LEFT}" y="{y - 8}" width="10" height="10" fill="{COLORS[series.color % len(COLORS)]}"/>'
        )
        found.append(f'<text x="{LEFT + 16}" y="{y + 1}">{_text(series.label[:70])}</text>')
    return found


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between two numbers."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step)
    return [round(place * step, 12) for place in range(first, math.floor(high / step + 1e-9) + 1)]


def _text(value: str) -> str:
    return escape(clean(value))
