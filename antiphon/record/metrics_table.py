"""The metrics of a run as a table of pandas and as a plot of matplotlib. Neither is a dependency."""

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.record import safe_files

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

WARM_START = "sft/"  # prefix of the metrics of supervised steps, which are counted apart
MOST_LINE = 1 << 20  # bytes


def read_metrics_table(run: Path) -> "pandas.DataFrame":
    """Return the metrics of a run, a row a training step, indexed by `step`.

    Of a step that was undone and done again, the row is the last one's; a step that was only undone has none. The steps of a
    warm start are left out, unless there are no others.

    Raises:
        UnsupportedError: pandas is not installed.
        RecordError: The file is damaged.
    """
    pandas = _import("pandas", "A table of metrics")
    rows: dict[bool, dict[int, dict[str, Any]]] = {True: {}, False: {}}
    lineages = {True: 0, False: 0}  # newest so far
    path = run / "metrics.jsonl"
    with safe_files.convert_read_errors(path), safe_files.resolve_file(run, path.name).open("rb") as file:
        while (line := file.readline(MOST_LINE)).endswith(b"\n"):  # a live run may be at its last line
            values = json.loads(line)
            # Lines of runs that are older than the counter `sft_step` are known by their metrics.
            is_warm_start = "sft_step" in values or any(name.startswith(WARM_START) for name in values)
            values["step"] = int(values.pop("sft_step", values.get("step")))
            if (lineage := int(values.get("lineage", 0))) > lineages[is_warm_start]:
                # It was resumed before its first step, which undid this step and later ones of the lineages before.
                lineages[is_warm_start], earlier = lineage, rows[is_warm_start].items()
                rows[is_warm_start] = {step: row for step, row in earlier if step < values["step"]}
            rows[is_warm_start][values["step"]] = values
        found = rows[False] or rows[True]
        ordered = [found[step] for step in sorted(found)]
        return pandas.DataFrame(ordered, columns=None if ordered else ["step"]).set_index("step")


def plot_metric(run: Path, metric: str = "reward/mean") -> "Axes":
    """Draw a metric of a run over its steps, and its mean over ten; in a notebook the figure is shown below the cell.

    Raises:
        UnsupportedError: matplotlib or pandas is not installed.
        ConfigError: The run has no such metric.
    """
    table = read_metrics_table(run)
    if metric not in table:
        known = sorted(map(str, table.columns))
        message = f"is no metric of the run; it has {', '.join(known) or 'none yet'}"
        raise ConfigError(message, key="metric", value=metric, valid=known)
    pyplot = _import("matplotlib.pyplot", "A plot")
    _, axes = pyplot.subplots(figsize=(7, 3))
    values = table[metric].dropna()
    axes.plot(values.index, values, alpha=0.35)
    axes.plot(values.index, values.rolling(10, min_periods=1).mean(), color=axes.lines[0].get_color())
    axes.set(xlabel="step", ylabel=metric, title=run.name)
    return axes


def _import(module: str, wanted_for: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        message = f"{wanted_for} needs {package}, which is not installed: pip install {package}"
        raise UnsupportedError(message, value=package) from error
