"""Resolve names to objects: a built-in name, a name that an installed package registers, or `package.module:attribute`.

A registry maps names to import paths, so that listing and validating names imports nothing.
"""

import difflib
import importlib
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

from antiphon.core.errors import ConfigError


class Registry:
    """The objects of one kind, by name; imports an object when it is resolved.

    Args:
        kind: What the objects are, for error messages, such as `environment`.
        built_in: Import path of each name that this package brings.
        group: Entry-point group in which other packages register more names. A built-in name wins over theirs.
    """

    def __init__(self, kind: str, built_in: Mapping[str, str], group: str = "") -> None:
        self.kind = kind
        self._shipped = dict(built_in)
        self._group = group

    @cached_property
    def built_in(self) -> dict[str, str]:
        """Import path of each name, registered names included."""
        registered = {each.name: each.value for each in entry_points(group=self._group)} if self._group else {}
        return {**registered, **self._shipped}

    def check(self, name: str) -> str:
        """Return `name` if it is a built-in name or has the form of an import path; raise `ConfigError` otherwise."""
        if name in self.built_in or ":" in name:
            return name
        nearest = difflib.get_close_matches(name, self.built_in, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        names = sorted(self.built_in)
        valid = f"valid are {', '.join(names)}, or package.module:attribute"
        raise ConfigError(f"unknown {self.kind} {name!r}: {hint}{valid}", value=name, valid=names, suggestions=nearest)

    def resolve(self, name: str) -> Any:
        """Import the object that `name` stands for; `ConfigError` if there is no such name, module or attribute."""
        path = self.built_in.get(self.check(name), name)
        return import_path(path, self.kind)


def import_path(path: str, kind: str = "object") -> Any:
    """Import `package.module:attribute`; `ConfigError` names what is missing. Errors inside the module propagate."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            message = f"{kind} {path!r}: there is no module {module_name!r} on the import path"
            raise ConfigError(message, value=path) from error
        raise
    if not hasattr(module, attribute):
        nearest = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        message = f"{kind} {path!r}: module {module_name!r} has no attribute {attribute!r}{hint}"
        raise ConfigError(message, value=path, suggestions=nearest)
    return getattr(module, attribute)
