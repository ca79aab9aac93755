"""The page of one run: its numbers now, its curated charts, and its configuration."""

from dataclasses import dataclass
from pathlib import Path

from antiphon.core.errors import AntiphonError
from antiphon.dashboard.cards import RunCard, read_notes, read_summary
from antiphon.dashboard.charts import list_charts
from antiphon.dashboard.curves import MetricTable
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site
from antiphon.dashboard.views.alarms import Alarm, list_alarms
from antiphon.dashboard.views.findings import Finding, list_findings
from antiphon.dashboard.views.series import AXES, choose_table
from antiphon.inspect.settings import list_changed_settings

MOST_SETTINGS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a run now: its label, value, form, and a sentence about it."""

    label: str
    value: float | None
    form: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartCard:
    """One chart of the page; the curves themselves are at `/api/chart/`."""

    id: str
    title: str
    shows: str
    worry: str
    remedy: str
    is_worrying: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting that differs from the default: key, value and default as JSON, and the key's meaning."""

    key: str
    value: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """One run.

    Attributes:
        card: Its line in the list of runs.
        figures: Its numbers now.
        findings: What stands out, with the pages that show it.
        remaining: Seconds until its last step, if it runs.
        charts: Charts whose metrics it has.
        absent: Titles of charts whose metrics it lacks, and the settings that record them.
        metrics: Names of all of its metrics.
        settings: Settings that differ from the defaults.
        settings_problem: The reason why they cannot be read; empty if they can.
        axis: Axis of the charts.
        smooth: Steps that lines average over, if the request names them.
        damaged: Lines of its metrics that cannot be read.
        note: The note about it.
        alarms: Signals of reward hacking that were above their thresholds.
    """

    card: RunCard
    figures: list[Figure]
    findings: list[Finding]
    remaining: float | None
    charts: list[ChartCard]
    absent: list[tuple[str, str]]
    metrics: list[str]
    settings: list[Setting]
    settings_problem: str
    axis: str
    smooth: int | None
    damaged: int
    note: str
    alarms: list[Alarm]


def query_run(site: Site, params: Params) -> RunPage:
    """Return one run; `x` is the axis of its charts."""
    run, card = site.folder.find(params.name), site.read_card(params.name)
    metrics = site.read_metrics(params.name)
    table = metrics.training if len(metrics.training) else metrics.supervised
    charts, absent = [], []
    for chart in list_charts((card.kind,)):
        of_chart = choose_table(metrics, chart)
        if any(of_chart.match(name) for name in chart.metrics):
            charts.append(
                ChartCard(
                    id=chart.id,
                    title=chart.title,
                    shows=chart.shows,
                    worry=chart.worry,
                    remedy=chart.remedy,
                    is_worrying=chart.is_worrying(of_chart),
                )
            )
        elif chart.absent and (card.kind == "rl" or card.kind in chart.kinds):
            absent.append((chart.title, chart.absent))
    settings, problem = [], ""
    try:
        settings = [
            Setting(key=each.key, value=each.value, default=each.default, meaning=each.meaning)
            for each in list_changed_settings(run)[:MOST_SETTINGS]
        ]
    except AntiphonError as error:
        problem = str(error)
    return RunPage(
        card=card,
        figures=_list_figures(card, table),
        findings=site.findings.read(run, lambda: _list_findings(site, params.name, run)),
        remaining=estimate_remaining(card, table),
        charts=charts,
        absent=absent,
        metrics=sorted({*metrics.training.names, *metrics.supervised.names}),
        settings=settings,
        settings_problem=problem,
        axis=params.choice("x", AXES, "step"),
        smooth=params.integer("smooth"),
        damaged=metrics.damaged,
        note=read_notes(run).text,
        alarms=list_alarms(metrics.training),
    )


def _list_findings(site: Site, name: str, run: Path) -> list[Finding]:
    """Read the metrics again: the findings are kept for the files as they are now."""
    return list_findings(run, site.read_metrics(name).training, read_summary(run).get("alarms"))


def _list_figures(card: RunCard, table: MetricTable) -> list[Figure]:
    rows = (
        ("reward", table.last("reward/mean"), "number", "mean score of the last step"),
        ("tokens / s", table.last("tokens/per_second"), "number", "sampled tokens a second"),
        ("length", table.last("length/mean"), "number", "sampled tokens of an attempt"),
        ("age", table.last("age/mean"), "number", "versions between sampling and training"),
        ("entropy", table.last("learner/entropy"), "number", "nats a token"),
        ("waiting", table.last("step/wait_groups_share"), "percent", "of a step the learner waits for groups"),
        ("seconds a step", table.last("step/seconds"), "number", "duration of the last step"),
        ("loss", table.last("sft/loss"), "small", "mean negative log-likelihood, in nats a token"),
        (
            "ranked",
            table.last("learner/accuracy"),
            "percent",
            "share of the last step's pairs that are ranked as in the data",
        ),
        ("divergence", table.last("learner/divergence"), "small", "from the teacher, in nats a token"),
        ("groups alive", table.last("groups/live"), "number", "admitted and not released"),
    )
    return [
        Figure(label=label, value=value, form=form, note=note) for label, value, form, note in rows if value is not None
    ]


def estimate_remaining(card: RunCard, table: MetricTable) -> float | None:
    """Estimate the seconds until the last step from the mean duration of the last 20."""
    if card.state != "running" or not card.steps or not len(table):
        return None
    recent = table.column("step/seconds")[-20:]
    mean = float(recent[recent > 0].mean()) if (recent > 0).any() else None
    return None if mean is None else max(card.steps - card.step, 0) * mean
