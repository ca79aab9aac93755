"""Trackers: destinations of a run's history besides its own directory, such as TensorBoard or Weights & Biases."""

from antiphon.record.trackers.base import Clock, RunTracker, TrackedRun, Tracker
from antiphon.record.trackers.config import TRACKERS, TrackersConfig
from antiphon.record.trackers.feed import Report, TrackerFeed, TrackerFeeds

__all__ = ["TRACKERS", "RunTracker", "TrackedRun", "Tracker", "TrackerFeeds", "TrackersConfig", "open_trackers"]


def open_trackers(config: TrackersConfig, run: TrackedRun, clock: Clock, report: Report) -> TrackerFeeds:
    """Open the trackers of a run, each with its own folder `<run>/<name>`; they start at their first `notify`.

    Raises:
        ConfigError: The library of a tracker is not installed, or a tracker of the user's own cannot be imported.
    """
    trackers = []
    for name, options in config.list_enabled():
        factory = TRACKERS.resolve(name, "record.trackers")
        folder = run.directory.path / name.replace(":", ".")
        if isinstance(options, dict):
            trackers.append((name, factory(folder, clock, **options)))
        else:
            trackers.append((name, factory(folder, clock, options)))
    return TrackerFeeds([TrackerFeed(name, tracker, run, report) for name, tracker in trackers])
