"""A configuration file with its overrides, and the place that each value was given at."""

import json
from pathlib import Path
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.yaml_text import Keys, iterate_lines, parse_yaml


class ConfigDocument:
    """A parsed file with its overrides, and the place that each value was given at."""

    def __init__(self, source: str, data: dict[str, Any], origins: dict[Keys, str]) -> None:
        self.source = source
        self.data = data
        self.origins = origins

    @classmethod
    def read(cls, path: Path) -> "ConfigDocument":
        """Read a YAML file; `ConfigError` unless it holds a mapping."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot be read: {reason}", path=str(path)) from error
        data, node = parse_yaml(text, str(path))
        if not isinstance(data, dict):
            raise ConfigError(
                f"a configuration is a mapping of keys to values, this is {shorten(data)}", path=str(path)
            )
        return cls(str(path), data, {keys: f"{path}:{line}" for keys, line in iterate_lines(node, (), ())})

    def override(self, override: str) -> None:
        """Apply an override such as `a.b=c`; the value is YAML, and an empty one is null."""
        dotted, equals, text = override.partition("=")
        parts = dotted.strip().split(".")
        if not equals or "" in parts:
            raise ConfigError("write it as key=value, for example rollout.group_size=4", path=f"override {override!r}")
        value, _ = parse_yaml(text, f"override {override!r}")
        at: Any = self.data
        keys: Keys = ()
        for part in parts[:-1]:
            key = _key(at, keys, part, override)
            keys = (*keys, key)
            if isinstance(at, dict) and at.get(key) is None:
                at[key] = {}
                self.origins[keys] = f"override {override!r}"
            at = at[key]
        last = _key(at, keys, parts[-1], override)
        at[last] = value
        keys = (*keys, last)
        self.origins = {place: origin for place, origin in self.origins.items() if place[: len(keys)] != keys}
        self.origins[keys] = f"override {override!r}"

    def origin(self, keys: Keys) -> str:
        """Return the place of the value at `keys`, or of what should hold it."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.origins:
                return self.origins[keys[:length]]
        return self.source

    def has(self, keys: Keys) -> bool:
        """Return True if there is a value at `keys`."""
        try:
            self.get(keys)
        except KeyError:
            return False
        return True

    def get(self, keys: Keys) -> Any:
        """Return the value at `keys`; `KeyError` if there is none."""
        at: Any = self.data
        for key in keys:
            inside = key in at if isinstance(at, dict) else isinstance(at, list) and key in range(len(at))
            if not inside:
                raise KeyError(key)
            at = at[key]
        return at


def _key(holder: Any, keys: Keys, part: str, override: str) -> str | int:
    """Return `part` as a key of `holder`, which is the value at `keys`."""
    if isinstance(holder, dict):
        return part
    key, path = dotted(keys), f"override {override!r}"
    if not isinstance(holder, list):
        raise ConfigError(f"is {shorten(holder)}; nothing can be set inside it", key=key, value=holder, path=path)
    if not part.isdigit() or int(part) >= len(holder):
        message = f"has {len(holder)} items, counted from 0; {part!r} is none of them"
        raise ConfigError(message, key=key, value=part, path=path)
    return int(part)


def dotted(keys: Keys) -> str:
    """Return the dotted form of a path."""
    return ".".join(map(str, keys))


def shorten(value: object) -> str:
    """Return a value as the user wrote it, 80 characters of it at most."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
