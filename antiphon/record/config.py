"""Configuration of what is recorded. Importing it imports no torch."""

from typing import Literal

from antiphon.core.config import Config


class RecordConfig(Config):
    """The run directory and the trackers."""

    directory: str = "runs"
    """Runs live in `<directory>/<name>`."""
    trackers: tuple[Literal["tensorboard"], ...] = ()
    """Beside `metrics.jsonl`, which is always written."""
    live: Literal["auto", "on", "off"] = "auto"
    """Live view in the terminal; `auto` uses it where there is a terminal, and prints one line a step elsewhere."""
    events: bool = False
    """Write `events.jsonl` (admissions, attempts, requests, loads, steps) and, at the end, `trace.json` for ui.perfetto.dev."""
