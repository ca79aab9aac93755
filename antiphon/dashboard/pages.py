"""All pages: the path, the query and the template of each. Each is also at `/api` as JSON."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site
from antiphon.dashboard.views.attempt import AttemptPage, query_attempt
from antiphon.dashboard.views.chat import ChatPage, query_chat
from antiphon.dashboard.views.compare import ComparePage, query_compare
from antiphon.dashboard.views.group import GroupPage, query_group
from antiphon.dashboard.views.now import NowPage, query_now
from antiphon.dashboard.views.record import RecordPage, query_record
from antiphon.dashboard.views.rollouts import RolloutsPage, query_rollouts
from antiphon.dashboard.views.run import RunPage, query_run
from antiphon.dashboard.views.runs import RunsPage, query_runs
from antiphon.dashboard.views.series import ChartData, query_chart, query_compared_chart
from antiphon.dashboard.views.timeline import TimelinePage, query_timeline


@dataclass(frozen=True, slots=True)
class Page:
    """One page.

    Attributes:
        path: Its path; the name of a run follows if it ends with a slash.
        query: Returns the record that it shows.
        result: Type of the record.
        template: Its template; empty if it is for programs only.
    """

    path: str
    query: Callable[[Site, Params], Any]
    result: type
    template: str = ""


PAGES = (
    Page("/runs", query_runs, RunsPage, "runs.html"),
    Page("/compare", query_compare, ComparePage, "compare.html"),
    Page("/now/", query_now, NowPage, "now.html"),
    Page("/run/", query_run, RunPage, "run.html"),
    Page("/rollouts/", query_rollouts, RolloutsPage, "rollouts.html"),
    Page("/group/", query_group, GroupPage, "group.html"),
    Page("/attempt/", query_attempt, AttemptPage, "attempt.html"),
    Page("/chat/", query_chat, ChatPage, "chat.html"),
    Page("/record/", query_record, RecordPage, "record.html"),
    Page("/timeline/", query_timeline, TimelinePage, "timeline.html"),
    Page("/chart/", query_chart, ChartData),
    Page("/compared-chart", query_compared_chart, ChartData),
)
