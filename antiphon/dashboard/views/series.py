"""Curves of one run or of several, as charts draw them."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from antiphon.dashboard.charts import CHARTS, Chart, find_chart
from antiphon.dashboard.curves import Curve, Metrics, MetricTable, average_seeds, downsample, rolling_mean
from antiphon.dashboard.errors import NotFoundError, RequestError
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site
from antiphon.inspect.settings import IDENTITY, flatten_settings
from antiphon.record import safe_files
from antiphon.record.safe_ledger import open_ledger

POINTS = 600  # of a curve
MOST_CURVES = 24  # of a chart
MOST_RUNS = 20  # that are compared
AXES = ("step", "version", "time")
SMOOTH_FROM = 40  # steps; shorter runs are drawn as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve.

    Attributes:
        label: Its name in the legend.
        kind: `line`; `faint`, the values behind a smoothed line; or `band`, between `low` and `high`.
        color: Number of its colour.
        x: Steps, policy versions, or seconds since the first step began.
        y: Values.
        low: Least value over the seeds of a band.
        high: Greatest value over the seeds of a band.
    """

    label: str
    kind: str
    color: int
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartData:
    """The curves of one chart.

    Attributes:
        id: Id of the chart.
        title: Title of the chart.
        form: Form of its numbers: number, percent or small.
        axis: `step`, `version` or `time`.
        least: Lower end of the value axis, if it is fixed.
        window: Steps that smoothed lines average over; 1 if they do not.
        series: The curves.
    """

    id: str
    title: str
    form: str
    axis: str
    least: float | None
    window: int
    series: list[Series]


def query_chart(site: Site, params: Params) -> ChartData:
    """Return the curves of the chart `chart` of one run over `x` (step, version or time), smoothed over `smooth` steps."""
    chart, axis = get_chart(params.text("chart")), params.choice("x", AXES, "step")
    return make_chart(site.read_metrics(params.name), chart, axis, _smooth(params))


def query_compared_chart(site: Site, params: Params) -> ChartData:
    """Return the first metric of a chart of several runs (`run`), one colour a run, or a band a group of seeds (`seeds=1`)."""
    chart, axis = get_chart(params.text("chart")), params.choice("x", AXES, "step")
    names = params.texts("run", MOST_RUNS)
    metrics = {name: site.read_metrics(name) for name in names}
    seeds = bool(params.choice("seeds", ("1",)))
    return make_compared_chart(metrics, chart, axis, seeds=seeds, smooth=_smooth(params))


def make_chart(metrics: Metrics, chart: Chart, axis: str, smooth: int | None = None) -> ChartData:
    """Return the curves of one run over an axis, smoothed over `smooth` steps; None chooses by the number of steps."""
    table = choose_table(metrics, chart)
    window = _window(smooth, len(table))
    place = _axis(metrics, table, axis)
    series: list[Series] = []
    names = [name for pattern in chart.metrics for name in table.match(pattern)][:MOST_CURVES]
    for color, name in enumerate(names):
        series += _make_lines(name, color, place, table.column(name), window)
    return _make_data(chart, axis, window, series)


def make_compared_chart(
    metrics: Mapping[str, Metrics], chart: Chart, axis: str, *, seeds: bool = False, smooth: int | None = None
) -> ChartData:
    """Return the first metric of a chart of several runs by their names; `seeds` draws seeds of one run as one band."""
    tables = {name: choose_table(each, chart) for name, each in metrics.items()}
    runs = {name: each.run for name, each in metrics.items()}
    groups = group_seeds(runs) if seeds else {name: [name] for name in runs}
    window = _window(smooth, max((len(table) for table in tables.values()), default=0))
    series: list[Series] = []
    for color, (label, members) in enumerate(groups.items()):
        curves = [curve for name in members if (curve := _first_curve(chart, metrics[name], axis)) is not None]
        if len(curves) > 1:
            smoothed = [(x, rolling_mean(y, window)) for x, y in curves]
            band = average_seeds([x for x, _ in smoothed], [y for _, y in smoothed], POINTS)
            series.append(
                Series(
                    label=label,
                    kind="band",
                    color=color,
                    x=band["x"],
                    y=band["mean"],
                    low=band["low"],
                    high=band["high"],
                )
            )
        elif curves:
            series += _make_lines(label, color, *curves[0], window)
    return _make_data(chart, axis, window, series)


def group_seeds(runs: Mapping[str, Path]) -> dict[str, list[str]]:
    """Group runs whose configurations differ in the seed alone; the label of a group of several names their number."""
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, run in runs.items():
        config: Mapping[str, object] = safe_files.read_config(run)
        kept = {key: value for key, value in config.items() if key not in (*IDENTITY, "seed")}
        found.setdefault(tuple(flatten_settings(kept)), []).append(name)
    return {
        group[0]
        if len(group) == 1
        else f"{group[0]} and {len(group) - 1} more seed{'s' if len(group) > 2 else ''}": group
        for group in found.values()
    }


def choose_table(metrics: Metrics, chart: Chart) -> MetricTable:
    """Return the table that has a chart's metrics: that of the training steps, or that of supervised steps."""
    is_supervised = all(name.startswith("sft/") for name in chart.metrics)
    return metrics.supervised if is_supervised or not len(metrics.training) else metrics.training


def get_chart(name: str) -> Chart:
    """Return the chart with an id, or of a metric; raise `NotFoundError` if there is none."""
    found = find_chart(name)
    if found is None:
        valid = ", ".join(each.id for each in CHARTS)
        raise NotFoundError(f"chart: {name!r:.80} is no chart; valid are {valid}, and the name of any metric")
    return found


def _smooth(params: Params) -> int | None:
    given = params.integer("smooth")
    if given is not None and not 1 <= given <= 1000:
        raise RequestError(f"smooth: {given} is not valid; valid are 1 to 1000 steps")
    return given


def _window(smooth: int | None, steps: int) -> int:
    return smooth if smooth is not None else (max(steps // 30, 2) if steps >= SMOOTH_FROM else 1)


def _axis(metrics: Metrics, table: MetricTable, axis: str) -> Curve:
    """Return the place of each step of a table; NaN for a step without a version."""
    if axis == "time":
        return table.seconds()
    if axis == "version":
        versions = _read_versions(metrics.run) if table is metrics.training else {}
        rows = zip(table.lineages, table.steps, strict=True)
        return np.array([versions.get(row, np.nan) for row in rows], np.float64)
    return np.array(table.steps, np.float64)


def _read_versions(run: Path) -> dict[tuple[int, int], int]:
    """Return the version that each step published, by lineage and step."""
    if not (run / "ledger.db").exists():
        return {}
    query = "SELECT lineage, step, version FROM steps WHERE version IS NOT NULL"
    with closing(open_ledger(run, check_pages=False)) as ledger, safe_files.convert_read_errors(run / "ledger.db"):
        return {(lineage, step): version for lineage, step, version in ledger.execute(query)}


def _first_curve(chart: Chart, metrics: Metrics, axis: str) -> tuple[Curve, Curve] | None:
    table = choose_table(metrics, chart)
    names = [name for pattern in chart.metrics for name in table.match(pattern)]
    if not names:
        return None
    place, values = _axis(metrics, table, axis), table.column(names[0])
    return place[np.isfinite(place)], values[np.isfinite(place)]


def _make_lines(label: str, color: int, x: Curve, y: Curve, window: int) -> list[Series]:
    """Return a curve, and its values behind it if it is smoothed and there are enough of them."""
    if window <= 1 or np.isfinite(y).sum() < SMOOTH_FROM:
        px, py = downsample(x, y, POINTS)
        return [Series(label=label, kind="line", color=color, x=px, y=py)]
    fx, fy = downsample(x, y, POINTS)
    mx, my = downsample(x, rolling_mean(y, window), POINTS)
    return [
        Series(label=f"{label}, each step", kind="faint", color=color, x=fx, y=fy),
        Series(label=label, kind="line", color=color, x=mx, y=my),
    ]


def _make_data(chart: Chart, axis: str, window: int, series: list[Series]) -> ChartData:
    return ChartData(
        id=chart.id, title=chart.title, form=chart.form, axis=axis, least=chart.least, window=window, series=series
    )
