"""A configuration file with its bases and overrides, and the place that each value was given at.

A file may name others that it changes: `base: common.yaml`, or a list of several. Mappings are merged key by key; any other
value, a list too, replaces that of the base. So does a section that names another recipe: what the base said was said of its
own. Of several bases the later one holds.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.yaml_text import Keys, iterate_lines, parse_yaml

BASE = "base"
"""Key at the top of a file that names the files which it changes, relative to its own folder."""


_MISSING = object()


class ConfigDocument:
    """A parsed file with its bases and overrides, and the place that each value was given at.

    Attributes:
        source: Name of the file, for errors.
        data: The values.
        origins: Place of each value: file and line, or the override.
        files: The file and its bases.
        shorthands: Sections that a plain text may stand for, each with the key that the text gives.
    """

    def __init__(self, source: str, data: dict[str, Any], origins: dict[Keys, str]) -> None:
        self.source = source
        self.data = data
        self.origins = origins
        self.files: tuple[Path, ...] = ()
        self.shorthands: Mapping[Keys, str] = {}

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

    @classmethod
    def read_merged(
        cls, path: Path, shorthands: Mapping[Keys, str] | None = None, above: tuple[Path, ...] = ()
    ) -> "ConfigDocument":
        """Read a YAML file over the files that it names as its base.

        Args:
            path: The file.
            shorthands: Sections that a plain text may stand for.
            above: Files that have this one as their base, which cannot be bases of it.
        """
        own = cls.read(path)
        own.shorthands = shorthands or {}
        named, place = own.data.pop(BASE, None), own.origin((BASE,))
        names = [] if named is None else named if isinstance(named, list) else [named]
        if not all(isinstance(name, str) and name for name in names):
            message = f"is {shorten(named)}; give the name of a YAML file, or a list of names"
            raise ConfigError(message, key=BASE, value=named, path=place)
        above = (*above, path)
        merged = cls(own.source, {}, {})
        merged.shorthands = own.shorthands
        for name in names:
            file = path.parent / name
            if file.resolve() in [each.resolve() for each in above]:
                circle = " → ".join(map(str, (*above, file)))
                raise ConfigError(f"a file cannot be its own base: {circle}", key=BASE, value=name, path=place)
            if not file.is_file():
                raise ConfigError(f"there is no file {file}", key=BASE, value=name, path=place)
            merged._merge(cls.read_merged(file, shorthands, above))
        merged._merge(own)
        merged.files = (path, *(each for each in merged.files if each != path))
        return merged

    def _merge(self, other: "ConfigDocument") -> None:
        """Change this document by the values of another one."""
        self.files = (*self.files, *(file for file in other.files if file not in self.files))
        self._merge_mapping(self.data, other.data, (), other.origins)

    def _merge_mapping(
        self, into: dict[str, Any], values: dict[str, Any], keys: Keys, origins: Mapping[Keys, str]
    ) -> None:
        for key, value in values.items():
            place = (*keys, key)
            if isinstance(value, dict):
                self._expand(into, key, place)
            before = into.get(key)
            if isinstance(value, dict) and isinstance(before, dict) and not self._begins_anew(place, before, value):
                self._merge_mapping(before, value, place, origins)
                continue
            into[key] = value
            size = len(place)
            self._forget(place)
            self.origins |= {each: origin for each, origin in origins.items() if each[:size] == place}

    def _begins_anew(self, keys: Keys, before: dict[str, Any], value: dict[str, Any]) -> bool:
        """Return True if a section names another recipe than the base: the base's keys were meant for that one."""
        short = self.shorthands.get(keys)
        return short in value and value[short] != before.get(short)

    def _expand(self, holder: Any, key: str | int, keys: Keys) -> None:
        """Write the section at `keys` out, if a plain text stands for it."""
        short = self.shorthands.get(keys)
        if short is not None and isinstance(holder, dict) and isinstance(holder.get(key), str):
            holder[str(key)] = {short: holder[str(key)]}
            self.origins[(*keys, short)] = self.origin(keys)

    def expand_shorthands(self) -> None:
        """Write every section out that a plain text stands for."""
        for keys in self.shorthands:
            if self.has(keys):
                holder = self.get(keys[:-1])
                self._expand(holder, keys[-1], keys)

    def _forget(self, keys: Keys) -> None:
        self.origins = {place: origin for place, origin in self.origins.items() if place[: len(keys)] != keys}

    def override(self, override: str) -> None:
        """Apply an override such as `a.b=c`; the value is YAML, and an empty one is null."""
        dotted, equals, text = override.partition("=")
        parts = dotted.strip().split(".")
        if not equals or "" in parts:
            raise ConfigError("write it as key=value, for example rollout.group_size=4", path=f"override {override!r}")
        value, _ = parse_yaml(text, f"override {override!r}")
        if " #" in text and isinstance(value, str) and value == text.partition(" #")[0].strip():
            message = "has a comment, which YAML leaves out: put the value in quotes, within those of the shell"
            raise ConfigError(message, path=f"override {override!r}")
        at: Any = self.data
        keys: Keys = ()
        for part in parts[:-1]:
            key = _key(at, keys, part, override)
            keys = (*keys, key)
            if isinstance(at, dict) and at.get(key) is None:
                at[key] = {}
                self.origins[keys] = f"override {override!r}"
            self._expand(at, key, keys)
            at = at[key]
        last = _key(at, keys, parts[-1], override)
        at[last] = value
        keys = (*keys, last)
        self._forget(keys)
        self.origins[keys] = f"override {override!r}"

    def origin(self, keys: Keys) -> str:
        """Return the place of the value at `keys`, or of what should hold it."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.origins:
                return self.origins[keys[:length]]
        return self.source

    def source_of(self, keys: Keys) -> str:
        """Return what gave the value at `keys`: the place in a file, `base` and its place, or the command line.

        Returns an empty string if nothing did, and the value is a default.
        """
        at: Any = self.data
        for key in keys:
            if isinstance(at, dict):
                at = at.get(key, _MISSING)
            elif isinstance(at, list):
                at = at[key] if isinstance(key, int) and key < len(at) else _MISSING
            elif at is None:
                return ""
            else:  # a plain value that stands for a section
                break
            if at is _MISSING:
                return ""
        origin = self.origin(keys)
        if origin.startswith("override "):
            return "command line"
        return origin if origin.startswith(f"{self.source}:") else f"base {origin}"

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
