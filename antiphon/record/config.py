"""Configuration of what is recorded. Importing it imports no torch."""

from pathlib import Path
from typing import Literal

from pydantic import field_validator

from antiphon.core.config import Config
from antiphon.record.trackers.config import SamplesConfig, TrackersConfig


class RecordConfig(Config):
    """The run directory and the trackers."""

    directory: str = "runs"
    """Runs are written to `<directory>/<name>`; `~` is the home folder."""
    trackers: TrackersConfig = TrackersConfig()
    """Trackers besides `metrics.jsonl`, which is always written: a list of names, or a mapping from names to options; a name
    is `tensorboard`, `wandb`, `mlflow`, `trackio`, `swanlab`, or `package.module:attribute` of your own."""
    samples: SamplesConfig = SamplesConfig()
    """Tables of sample rollouts that trackers receive."""
    live: Literal["auto", "on", "off"] = "auto"
    """Live view in the terminal; `auto` shows it in a terminal, and prints one line a step elsewhere."""
    events: bool = False
    """Write `events.jsonl` (admissions, attempts, requests, loads, steps) and, at the end, `trace.json` for ui.perfetto.dev."""

    spans: str = ""
    """URL of an OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces, that receives the spans of steps, attempts,
    requests and calls of roles while the run goes on (OTLP over HTTP). Empty: none."""

    @field_validator("spans")
    @classmethod
    def _is_url(cls, given: str) -> str:
        if given and not given.startswith(("http://", "https://")):
            raise ValueError(f"{given!r} must be a URL that begins with http:// or https://")
        return given

    @field_validator("directory")
    @classmethod
    def _expand_home(cls, given: str) -> str:  # a shell leaves it as it is in key=~/runs
        return str(Path(given).expanduser()) if given.startswith("~") else given


class RunRecordConfig(RecordConfig):
    """The run directory and the trackers of a run that samples."""

    token_stats: tuple[Literal["entropy", "advantage", "log_ratio", "waad", "fai"], ...] = ()
    """Numbers of each token that a step trained on, written to `token_stats/`: `entropy` of the policy before the step;
    `advantage`; `log_ratio`, the log-prob under that policy minus the one of sampling; `waad` and `fai`, with
    `algorithm.rhythm`. `entropy` and `log_ratio` together cost one forward pass a step."""
