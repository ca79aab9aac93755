"""Sending the history of a run to trackers, each in a thread of its own, so that none of them can delay or end training."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from antiphon.record.trackers.base import TRAIN, LastSteps, RunTracker, TrackedRun, Tracker
from antiphon.record.trackers.follower import StepFile

COUNTERS = ("step", "sft_step")
FAILURES = 3  # in a row, after which a tracker receives nothing more
CLOSING_SECONDS = 120.0  # at the end of a run, for all trackers together

Report = Callable[[str], None]


class TrackerFeed:
    """Sends the history of a run to one tracker, from the files that the run writes.

    Args:
        name: Name of the tracker in the configuration.
        tracker: The tracker, which nobody else may use.
        run: The run.
        report: Receives one line when the tracker fails, and one when it gave up.
    """

    def __init__(self, name: str, tracker: Tracker | RunTracker, run: TrackedRun, report: Report) -> None:
        self.name = name
        self._tracker = tracker
        self._run = run
        self._report = report
        self._condition = threading.Condition()
        self._has_news = False
        self._closing = False
        self._failures = 0
        self._thread = threading.Thread(target=self._follow, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Say that a step was written, or at first that the configuration was: the tracker starts, with all that there is."""
        with self._condition:
            self._has_news = True
            self._condition.notify()

    def begin_closing(self) -> None:
        """Say that nothing more will be written."""
        with self._condition:
            self._closing = self._has_news = True
            self._condition.notify()

    def wait_closed(self, seconds: float) -> None:
        """Wait until everything is sent, so many seconds at most; report what is not."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._report(f"tracker {self.name}: it does not end; what it lacks is in {self._run.directory.path}")

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        session: _Session | None = None
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._has_news)
                self._has_news, closing = False, self._closing
            try:
                session = session or _Session(self._tracker, self._run)
                session.send()
                self._failures = 0
                if closing:
                    session.finish()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker's failure, of any kind, is not the run's
                session = None
                self._on_failure(error, closing)
            if closing or self._failures == FAILURES:
                return

    def _on_failure(self, error: BaseException, closing: bool) -> None:
        self._failures += 1
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        if self._failures == 1:
            then = "it is closed" if closing else "it is tried again after the next steps"
            self._report(f"tracker {self.name} failed ({text}); the run goes on, and {then}")
        elif self._failures == FAILURES:
            self._report(f"tracker {self.name} failed {FAILURES} times in a row ({text}); it receives nothing more")
        if isinstance(self._tracker, RunTracker):
            with suppress(Exception, SystemExit):  # it has failed already
                self._tracker.abandon()


class _Session:
    """From the start of a tracker to its end or its failure."""

    def __init__(self, tracker: Tracker | RunTracker, run: TrackedRun) -> None:
        self._tracker = tracker
        self._run = run
        self._last = dict(self._start())
        self._metrics = StepFile(run.directory.metrics, run.lineage, run.cut)
        self._samples = StepFile(run.directory.samples, run.lineage, run.cut)

    def _start(self) -> LastSteps:
        if isinstance(self._tracker, RunTracker):
            return self._tracker.start(self._run)
        # It cannot say what it has: earlier lineages logged what came before.
        return {TRAIN: self._run.cut, "sft": 2**62 if self._run.lineage else 0}

    def send(self) -> None:
        """Send the steps that were written since the last call."""
        self._metrics.update()
        self._samples.update()  # a step's table is written before its metrics
        for (phase, step), record in self._metrics.take_after(self._last):
            metrics = {name: value for name, value in record.items() if name not in COUNTERS and value is not None}
            metrics[f"{phase}/lineage"] = metrics.pop("lineage")
            if isinstance(self._tracker, RunTracker):
                table = self._samples.take((phase, step)) or {"rows": ()}
                self._tracker.log(phase, step, metrics, table["rows"])
                self._tracker.write_state(**{phase: step})
            else:
                self._tracker.log(step, metrics)
            self._last[phase] = step

    def finish(self) -> None:
        """Close the tracker."""
        if isinstance(self._tracker, RunTracker):
            self._tracker.finish(self._run, self._run.find_model())
        else:
            self._tracker.close()


class TrackerFeeds:
    """The trackers of a run."""

    def __init__(self, feeds: Sequence[TrackerFeed] = ()) -> None:
        self._feeds = feeds

    def __bool__(self) -> bool:
        return bool(self._feeds)

    def notify(self) -> None:
        """Say that there is something new to read: the configuration, a step in `metrics.jsonl`."""
        for feed in self._feeds:
            feed.notify()

    def close(self) -> None:
        """Send the rest, and close the trackers; those that take too long are left behind."""
        for feed in self._feeds:
            feed.begin_closing()
        for feed in self._feeds:
            feed.wait_closed(CLOSING_SECONDS / len(self._feeds))
