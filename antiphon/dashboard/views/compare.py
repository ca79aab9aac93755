"""The page that compares several runs."""

from dataclasses import dataclass
from pathlib import Path

from antiphon.dashboard.cards import RunCard
from antiphon.dashboard.charts import list_charts
from antiphon.dashboard.differences import Difference
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site
from antiphon.dashboard.views.series import AXES, MOST_RUNS, choose_table, group_seeds
from antiphon.inspect.settings import compare_settings

MOST_SETTINGS = 300
SMALL = 32 << 20  # bytes of a ledger that is compared without being asked


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePage:
    """Several runs beside each other.

    Attributes:
        runs: The runs.
        colors: Number of the colour of each run, the same for seeds that are one band.
        charts: Id, title and sentence of each chart that at least one of them has.
        settings: Settings in which they differ, with the value in each run as JSON; None where it is absent.
        axis: Axis of the charts.
        seeds: True if runs that differ in the seed alone are drawn as one band.
        smooth: Steps that lines average over, if the request names them.
        differences: Each run but the first, and its first difference from that one.
    """

    runs: list[RunCard]
    colors: list[int]
    charts: list[tuple[str, str, str]]
    settings: list[tuple[str, list[str | None]]]
    axis: str
    seeds: bool
    smooth: int | None
    differences: list[tuple[str, Difference]]


def query_compare(site: Site, params: Params) -> ComparePage:
    """Return the runs `run`, up to 20 of them, beside each other; `diff=1` looks for first differences in large runs too."""
    names = params.texts("run", MOST_RUNS)
    metrics, cards = [site.read_metrics(name) for name in names], [site.read_card(name) for name in names]
    charts = [
        (chart.id, chart.title, chart.shows)
        for chart in list_charts({card.kind for card in cards})
        if any(choose_table(each, chart).match(name) for each in metrics for name in chart.metrics[:1])
    ]
    seeds = bool(params.choice("seeds", ("1",)))
    settings = compare_settings([site.folder.find(name) for name in names]) if len(names) > 1 else []
    groups = (
        list(group_seeds({name: site.folder.find(name) for name in names}).values())
        if seeds
        else [[name] for name in names]
    )
    return ComparePage(
        runs=cards,
        colors=[next(number for number, group in enumerate(groups) if name in group) for name in names],
        charts=charts,
        settings=settings[:MOST_SETTINGS],
        axis=params.choice("x", AXES, "step"),
        seeds=seeds,
        smooth=params.integer("smooth"),
        differences=_read_differences(site, params, names),
    )


def _read_differences(site: Site, params: Params, names: list[str]) -> list[tuple[str, Difference]]:
    """Return each run but the first with its first difference; of small runs that do not go on it is looked for at once."""
    is_asked, runs = bool(params.choice("diff", ("1",))), [site.folder.find(name) for name in names]
    quick = {
        name: _is_small(run) and site.read_card(name).state != "running" for name, run in zip(names, runs, strict=True)
    }
    return [
        (name, site.differences.read(runs[0], run, ask=is_asked or (quick[names[0]] and quick[name])))
        for name, run in zip(names[1:], runs[1:], strict=True)
    ]


def _is_small(run: Path) -> bool:
    ledger = run / "ledger.db"
    return ledger.exists() and ledger.stat().st_size < SMALL
