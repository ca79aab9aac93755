"""Settings of recorded runs: where they differ from the defaults, and from each other."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from antiphon.inspect.options import list_options
from antiphon.record import safe_files
from antiphon.run.config import RunConfig

IDENTITY = ("name", "record", "checkpoint")  # keys that only name or store a run


@dataclass(frozen=True, slots=True)
class ChangedSetting:
    """One setting of a run that is not the default.

    Attributes:
        key: Dotted key.
        value: Its value, as JSON.
        default: The default, as JSON; empty if the key is required or unknown to this version.
        meaning: One sentence about the key; empty if it is unknown.
    """

    key: str
    value: str
    default: str
    meaning: str


def flatten_settings(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value of nested mappings and lists as JSON, with its dotted key; a list of plain values is one value."""
    inner = dict(enumerate(tree)) if isinstance(tree, list) and isinstance(next(iter(tree), 0), dict | list) else tree
    if not isinstance(inner, dict) or not inner:
        yield key, json.dumps(tree, default=str)
        return
    for name, value in inner.items():
        yield from flatten_settings(value, f"{key}.{name}" if key else str(name))


def list_changed_settings(run: Path) -> list[ChangedSetting]:
    """Return the settings of a run that differ from the defaults of this version, in the order of its configuration."""
    known, found = _read_defaults(), []
    for key, value in flatten_settings(safe_files.read_config(run)):
        default, meaning = known.get(re.sub(r"\.\d+(?=\.|$)", "[]", key), ("", ""))
        is_absent = not default and value in ("null", "[]", "{}")  # a section that is not there
        if not is_absent and (not default or json.loads(value) != json.loads(default)):
            found.append(ChangedSetting(key, value, default, meaning))
    return found


@cache
def _read_defaults() -> dict[str, tuple[str, str]]:
    return {option.key: (option.default, option.meaning) for option in list_options(RunConfig)}


def compare_settings(runs: Sequence[Path]) -> list[tuple[str, list[str | None]]]:
    """Return the settings in which runs differ: the key, and its value in each run as JSON, or None where it is absent."""
    settings = []
    for run in runs:
        config = {key: value for key, value in safe_files.read_config(run).items() if key not in IDENTITY}
        settings.append(dict(flatten_settings(config)))
    keys = dict.fromkeys(key for each in settings for key in each)
    rows = [(key, [each.get(key) for each in settings]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
