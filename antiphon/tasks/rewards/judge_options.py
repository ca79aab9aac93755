"""The options of a judge that say where its model is, when that is behind an address."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from antiphon.tasks.rewards import COMPOSED

REMOTE_OPTIONS = frozenset(
    {
        "address",
        "model",
        "key",
        "attempts",
        "timeout",
        "settings",
        "requests_per_minute",
        "input_price",
        "output_price",
        "cache",
    }
)  # of `RemoteJudge`, which is slow to import


def iterate_remote_judges(reward: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the options of each remote model that a reward or a part of it asks."""
    parts = options.get("parts") if reward in COMPOSED else None
    for part in parts.values() if isinstance(parts, Mapping) else ():
        if isinstance(part, Mapping):
            yield from iterate_remote_judges(str(part.get("reward")), part.get("options") or {})
    if reward == "judge" and "address" in options:
        yield {name: value for name, value in options.items() if name in REMOTE_OPTIONS}


def remote_judge_key(options: Mapping[str, Any]) -> str:
    """Return what judges that ask the same model in the same way have in common."""
    asked = {name: value for name, value in options.items() if name in REMOTE_OPTIONS}
    return json.dumps(asked, sort_keys=True, default=str)


def without_remote(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other options of a judge."""
    return {name: value for name, value in options.items() if name not in REMOTE_OPTIONS}
