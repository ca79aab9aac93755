"""Charts of runs as files, without a browser: SVG and CSV as the pages give them, and PNG by matplotlib."""

import io
from collections.abc import Sequence
from pathlib import Path

from antiphon.core.errors import ConfigError
from antiphon.core.optional_packages import import_optional
from antiphon.dashboard.charts import CHARTS
from antiphon.dashboard.curves import Metrics
from antiphon.dashboard.export import COLORS, chart_csv, chart_svg
from antiphon.dashboard.rendering import clean
from antiphon.dashboard.views.series import (
    AXES,
    MOST_RUNS,
    ChartData,
    choose_table,
    get_chart,
    make_chart,
    make_compared_chart,
)
from antiphon.record import safe_files

FORMATS = (".svg", ".png", ".csv")
DOTS_PER_INCH = 200  # of a PNG


def plot_runs(
    runs: Sequence[Path], out: Path, *, chart: str = "reward", axis: str = "step", seeds: bool = False
) -> None:
    """Draw a chart of runs into a file.

    Args:
        runs: Run directories; of several, the first metric of the chart is drawn.
        out: The file, whose ending gives the format.
        chart: Id of a chart of the dashboard, or the name of a metric.
        axis: One of `AXES`.
        seeds: Draw runs that differ in the seed alone as their mean with a band from the least to the greatest.

    Raises:
        ConfigError: An argument is not valid, matplotlib is missing, or the file cannot be written.
        NotFoundError: There is no such chart.
        RecordError: A directory holds no run that can be read.
    """
    if out.suffix not in FORMATS:
        raise ConfigError(f"must end with {', '.join(FORMATS)}", key="--out", value=str(out), valid=FORMATS)
    if axis not in AXES:
        raise ConfigError(f"{axis!r} is no axis; valid are {', '.join(AXES)}", key="--x", value=axis, valid=AXES)
    if len(runs) > MOST_RUNS:
        raise ConfigError(f"at most {MOST_RUNS} runs fit a chart, not {len(runs)}", key="RUN", value=len(runs))
    data = _read_chart(runs, chart, axis, seeds)
    make = {
        ".svg": lambda: chart_svg(data).encode("utf-8", "replace"),
        ".csv": lambda: chart_csv(data).encode("utf-8", "replace"),
    }
    content = make.get(out.suffix, lambda: chart_png(data))()
    try:
        out.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", key="--out", value=str(out)) from error


def _read_chart(runs: Sequence[Path], name: str, axis: str, seeds: bool) -> ChartData:
    """Return the curves of a chart; raise `ConfigError` if no run has any of its metrics."""
    chart, metrics = get_chart(name), {}
    names = [run.resolve().name for run in runs]
    for run, label in zip(runs, names, strict=True):
        safe_files.resolve_file(run, "config.yaml")
        found = metrics[label if names.count(label) == 1 else str(run)] = Metrics(run)
        found.follow()
    if len(metrics) == 1:
        data = make_chart(next(iter(metrics.values())), chart, axis)
    else:
        data = make_compared_chart(metrics, chart, axis, seeds=seeds)
    if not any(series.x for series in data.series):
        tables = [choose_table(each, other) for each in metrics.values() for other in CHARTS]
        have = [each.id for each in CHARTS if any(table.match(each.metrics[0]) for table in tables)]
        message = f"no run has the metrics of {name!r}; they have {', '.join(have) or 'none yet'}"
        raise ConfigError(message, key="--chart", value=name, valid=tuple(have))
    return data


def chart_png(chart: ChartData) -> bytes:
    """Return a chart as PNG; raise `ConfigError` if matplotlib is not installed."""
    figures = import_optional("matplotlib.figure", "a PNG")
    figure = figures.Figure(figsize=(6.4, 3.2), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    for series in chart.series:
        color, faint = COLORS[series.color % len(COLORS)], series.kind == "faint"
        label = None if faint else clean(series.label[:70]).replace("$", r"\$")
        axes.plot(
            series.x, series.y, color=color, alpha=0.3 if faint else 1, linewidth=0.8 if faint else 1.4, label=label
        )
        if series.kind == "band":
            axes.fill_between(series.x, series.low, series.high, color=color, alpha=0.15, linewidth=0)
    if chart.form == "percent":
        axes.yaxis.set_major_formatter(import_optional("matplotlib.ticker", "a PNG").PercentFormatter(1))
    if chart.least is not None:
        axes.set_ylim(bottom=min(chart.least, axes.get_ylim()[0]))
    axes.set(title=chart.title, xlabel="seconds" if chart.axis == "time" else chart.axis)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False, fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
