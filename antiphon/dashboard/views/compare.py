"""The page that compares several runs."""

from dataclasses import dataclass

from antiphon.dashboard.cards import RunCard
from antiphon.dashboard.charts import CHARTS
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site
from antiphon.dashboard.views.series import AXES, MOST_RUNS, choose_table, group_seeds
from antiphon.inspect.settings import compare_settings

MOST_SETTINGS = 300


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
    """

    runs: list[RunCard]
    colors: list[int]
    charts: list[tuple[str, str, str]]
    settings: list[tuple[str, list[str | None]]]
    axis: str
    seeds: bool
    smooth: int | None


def query_compare(site: Site, params: Params) -> ComparePage:
    """Return the runs `run`, up to 20 of them, beside each other."""
    names = params.texts("run", MOST_RUNS)
    metrics = [site.read_metrics(name) for name in names]
    charts = [
        (chart.id, chart.title, chart.shows)
        for chart in CHARTS
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
        runs=[site.read_card(name) for name in names],
        colors=[next(number for number, group in enumerate(groups) if name in group) for name in names],
        charts=charts,
        settings=settings[:MOST_SETTINGS],
        axis=params.choice("x", AXES, "step"),
        seeds=seeds,
        smooth=params.integer("smooth"),
    )
