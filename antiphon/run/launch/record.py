"""Opening the record of a run: its directory, ledger, metrics, trackers and live view."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from antiphon.core.config import dump
from antiphon.core.types import PolicyVersion
from antiphon.record.events import Events, write_trace
from antiphon.record.ledger import Ledger
from antiphon.record.live import View, make_view
from antiphon.record.metrics import Metrics
from antiphon.record.resume import ResumeState, open_first_lineage, open_next_lineage
from antiphon.record.run_dir import RunDirectory, RunLineage, remove_partial_line
from antiphon.record.spans import SpanExporter
from antiphon.record.store import LedgerStore
from antiphon.record.trackers import TrackedRun, TrackerFeeds, open_trackers
from antiphon.run.config import RunConfig
from antiphon.run.config_changes import check_same


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """Everything that a run writes to, and what it read there when it was resumed."""

    directory: RunDirectory
    ledger: Ledger
    metrics: Metrics
    trackers: TrackerFeeds = field(default_factory=TrackerFeeds)
    view: View
    resumption: ResumeState | None = None
    in_thread: Callable[..., Awaitable[None]] = asyncio.to_thread  # runs slow writes

    @property
    def events(self) -> Events:
        """Events of the run."""
        return self.ledger.events

    @property
    def lineage(self) -> RunLineage:
        """Directory and lineage, for those who write beside the ledger."""
        return RunLineage(self.directory, self.first_version.lineage)

    def write_config(self, config: RunConfig) -> None:
        """Write the configuration, which is complete now, and start the trackers, which read it."""
        self.directory.write_config(dump(config))
        self.trackers.notify()

    @property
    def first_version(self) -> PolicyVersion:
        """Version that the run begins at."""
        if self.resumption is None:
            return PolicyVersion(0, 0)
        return PolicyVersion(self.resumption.lineage, self.resumption.state["version"])


async def open_record(config: RunConfig, directory: RunDirectory, stack: AsyncExitStack, *, resume: bool) -> RunRecord:
    """Open the files of a run in its directory, new ones or those of the run to `resume`; `stack` closes them."""
    view = make_view(config.record.live)
    if resume:
        check_same(directory.config, config)
    store = LedgerStore(directory.path)
    stack.callback(store.close)
    directory.write_config(dump(config))
    asynchronous = f"asynchronous ratio {config.rollout.async_ratio:g}"
    view.start(config.name, f"{config.rollout.capacity} groups alive, {asynchronous}")
    stack.callback(view.close)
    resumption = _open_lineage(store, directory, config, view, resume)
    lineage, step = (resumption.lineage, resumption.state["step"]) if resumption else (0, 0)
    metrics = stack.enter_context(Metrics(directory.metrics, lineage=lineage))
    tracked = TrackedRun(name=config.name, directory=directory, lineage=lineage, cut=step)
    trackers = open_trackers(config.record.trackers, tracked, time.time, view.message)
    stack.callback(trackers.close)
    ledger = Ledger(store, _open_events(config, directory, lineage, stack), lineage=lineage, step=step)
    stack.push_async_callback(ledger.close)
    return RunRecord(
        directory=directory, ledger=ledger, metrics=metrics, trackers=trackers, view=view, resumption=resumption
    )


def _open_lineage(
    store: LedgerStore, directory: RunDirectory, config: RunConfig, view: View, resume: bool
) -> ResumeState | None:
    """Open the first lineage of a run, or the next one from its newest checkpoint."""
    if not resume:
        open_first_lineage(store)
        return None
    by_reference = config.rollout.workers > 0
    found = open_next_lineage(store, directory.checkpoints, config.rollout.max_age, view.message, refer=by_reference)
    if config.rollout.deterministic:
        # What is left of a wave would be computed in other company, and differ in the last bit.
        found.reusable.by_prompt.clear()
    found.reusable.exclude_tasks(config.judged_together)
    kept = sum(map(len, found.reusable.by_prompt.values()))
    view.message(
        f"resuming after step {found.state['step']}: {found.lost} attempts were lost, {kept} finished ones are at hand"
    )
    return found


def _open_events(config: RunConfig, directory: RunDirectory, lineage: int, stack: AsyncExitStack) -> Events:
    """Open the record of events, if it is wanted; a trace is made of them in the end. Export spans, if that is wanted."""
    clock, sink, export = asyncio.get_running_loop().time, None, None
    if config.record.events:
        stack.callback(write_trace, directory.events, directory.trace)
        remove_partial_line(directory.events)
        sink = stack.enter_context(directory.events.open("a", encoding="utf-8"))
    if config.record.spans:
        export = SpanExporter(config.record.spans, config.name, lineage, clock)
        stack.callback(export.close)
    return Events(clock, sink, export)
