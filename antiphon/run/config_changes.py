"""The configuration keys that may change when a run is resumed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from antiphon.core.config import Config, load
from antiphon.core.errors import ConfigError

CHANGEABLE = (
    "steps",
    "record",
    "checkpoint",
    "evaluation.every",
    "evaluation.blocking",
    "evaluation.concurrency",
    "evaluation.minimum_accuracy",
    "cluster",
    "placement",
    "weights",
    "engine.replicas",
    "engine.minimum",
    "engine.options.urls",
    "engine.also",
    "rollout.workers",
    "rollout.timeout",
    "rollout.engine_timeout",
    "rollout.load_timeout",
    "rollout.environment_timeout",
    "rollout.environment_concurrency",
    "rollout.engine_restarts",
    "learner.kind",
    "learner.options",
    "learner.threads",
    "learner.mesh",
    "learner.cpu_offload",
    "learner.optimizer",
    "learner.on_nonfinite",
    "learner.timeout",
    "critic.optimizer",
    "meshes",
    "grading",
    "check",
    "profile",
)
BRANCH = ", which `antiphon branch` begins at a checkpoint of this one"
ROLE = re.compile(r"roles\.\w+\.(placement|timeout|workers)")  # of a role of the user's own


def check_same(
    written: Path, config: Config, changeable: tuple[str, ...] = CHANGEABLE, elsewhere: str = BRANCH
) -> None:
    """Raise `ConfigError` if another key differs between `config` and the configuration file of a run.

    Args:
        written: The file.
        config: The configuration of the resume.
        changeable: Keys that may change, with all that is under them.
        elsewhere: What the message says of another run.
    """
    for path, before, now in list_changes(load(written, model=type(config)), config):
        if not path.startswith(changeable) and not ROLE.fullmatch(path):
            raise ConfigError(
                f"was {before!r} and is {now!r} now: that would be another run{elsewhere}. A resume may change "
                f"{', '.join(changeable)}",
                key=path,
                value=now,
                valid=changeable,
                path=str(written),
            )


def list_changes(before: Config, now: Config) -> list[tuple[str, Any, Any]]:
    """Return the dotted keys whose values differ, sorted, each with both values; None stands for a missing one."""
    old, new = (dict(flatten(config.model_dump())) for config in (before, now))
    return [
        (key, old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    ]


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each leaf of nested mappings; one with a key that no path can have is a leaf."""
    if isinstance(value, dict) and value and all(re.fullmatch(r"[^\s.=]+", str(key)) for key in value):
        for key, inner in value.items():
            yield from flatten(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
