"""Configuration of what is recorded. Importing it imports no torch."""

from typing import Annotated, Literal

from pydantic import AfterValidator

from antiphon.core.config import Config
from antiphon.core.errors import ConfigError, ValidatorError
from antiphon.record.trackers import TRACKERS


def _check_tracker(name: str) -> str:
    try:
        return TRACKERS.check(name)
    except ConfigError as error:
        raise ValidatorError(error.mistakes) from error  # the loader adds the key


class RecordConfig(Config):
    """The run directory and the trackers."""

    directory: str = "runs"
    """Runs are written to `<directory>/<name>`."""
    trackers: tuple[Annotated[str, AfterValidator(_check_tracker)], ...] = ()
    """Trackers besides `metrics.jsonl`, which is always written: `tensorboard`, or `package.module:attribute` of your own."""
    live: Literal["auto", "on", "off"] = "auto"
    """Live view in the terminal; `auto` shows it in a terminal, and prints one line a step elsewhere."""
    events: bool = False
    """Write `events.jsonl` (admissions, attempts, requests, loads, steps) and, at the end, `trace.json` for ui.perfetto.dev."""
