"""Resolve names to objects: a built-in name, a name that an installed package registers, or `package.module:attribute`.

A registry maps names to import paths, so that listing and validating names imports nothing.
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import symtable
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.import_order import find_hidden_file
from antiphon.core.objects import is_attached_name, resolve_attached
from antiphon.core.optional_packages import how_to_install, list_extras, normalize_name
from antiphon.core.user_errors import describe_error


class Registry:
    """The objects of one kind, by name; imports an object when it is resolved.

    Args:
        kind: What the objects are, for error messages, such as `environment`.
        built_in: Import path of each name that this package brings.
        group: Entry-point group in which other packages register more names. A built-in name wins over theirs.
        callables: The objects are functions or classes; anything else is refused.
    """

    def __init__(self, kind: str, built_in: Mapping[str, str], group: str = "", *, callables: bool = False) -> None:
        self.kind = kind
        self.shipped = dict(built_in)
        self.group = group
        self.callables = callables

    @cached_property
    def known(self) -> dict[str, str]:
        """Import path of each name, registered names included."""
        registered = {each.name: each.value for each in entry_points(group=self.group)} if self.group else {}
        return {**registered, **self.shipped}

    def check(self, name: str, key: str = "") -> str:
        """Return `name` if it is a built-in name or has the form of an import path; raise `ConfigError` otherwise.

        Args:
            name: The name.
            key: Dotted key that the configuration has it under, for the error.
        """
        if name in self.known or ":" in name:
            return name
        nearest = difflib.get_close_matches(name, self.known, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        names = sorted(self.known)
        valid = f"valid are {', '.join(names)}, or package.module:attribute"
        message = f"unknown {self.kind} {name!r}: {hint}{valid}"
        raise ConfigError(message, key=key, value=name, valid=names, suggestions=nearest)

    def resolve(self, name: str, key: str = "") -> Any:
        """Import the object that `name` stands for; `ConfigError` if there is no such name, module or attribute."""
        path = self.known.get(self.check(name, key), name)
        found = import_path(path, self.kind, key)
        if self.callables and not callable(found):
            message = f"{self.kind} {name!r} must be a function or a class, and is a {type(found).__name__}"
            raise ConfigError(message, key=key, value=name)
        return found


def import_path(path: str, kind: str = "object", key: str = "") -> Any:
    """Import `package.module:attribute`, which the configuration has under `key`, or return the attached object of this name.

    Errors inside a module of Antiphon propagate, except that a package of an extra is missing.

    Raises:
        ConfigError: There is no such module, attribute or object, it has the name of a module of the standard library, or it
            cannot be imported; the message names file and line.
    """
    if is_attached_name(path):
        return resolve_attached(path, key)
    module_name, _, attribute = path.partition(":")
    _require_not_hidden(module_name, path, kind, key)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            message = f"{kind} {path!r}: there is no module {module_name!r} on the import path"
            raise ConfigError(message, key=key, value=path) from error
        package = normalize_name((error.name or "").partition(".")[0])
        if package in list_extras():
            message = f"{kind} {path!r} imports {package}, which is not installed: {how_to_install(package)}"
            raise ConfigError(message, key=key, value=path) from error
        raise _make_import_error(error, path, kind, key) from error
    except AntiphonError:
        raise
    except Exception as error:  # named boundary: the user's module
        raise _make_import_error(error, path, kind, key) from error
    if not hasattr(module, attribute):
        nearest = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        message = f"{kind} {path!r}: module {module_name!r} has no attribute {attribute!r}{hint}"
        raise ConfigError(message, key=key, value=path, suggestions=nearest)
    return getattr(module, attribute)


def _require_not_hidden(module: str, path: str, kind: str, key: str) -> None:
    """Raise `ConfigError` if the standard library hides a project's module."""
    if file := find_hidden_file(module):
        message = f"{kind} {path!r}: {file} has the name of a module of the standard library, which hides it; rename it"
        raise ConfigError(message, key=key, value=path)


def _make_import_error(error: Exception, path: str, kind: str, key: str) -> Exception:
    """Return the error for a module that raises while it is imported; of a module of Antiphon, its own error."""
    if path.startswith("antiphon."):
        return error
    return ConfigError(f"{kind} {path!r} cannot be imported: {describe_error(error)}", key=key, value=path)


def check_import_path(path: str, kind: str = "object", key: str = "") -> None:
    """Check that `import_path` will find `package.module:attribute`, as far as files tell; imports nothing.

    Raises:
        ConfigError: There is no such module, or its source has no such name.
    """
    module_name, _, attribute = path.partition(":")
    if is_attached_name(path):
        return
    _require_not_hidden(module_name, path, kind, key)
    if module_name in sys.modules:
        import_path(path, kind, key)
        return
    source = _find_source(module_name)
    if source is None:
        message = f"{kind} {path!r}: there is no module {module_name!r} on the import path"
        raise ConfigError(message, key=key, value=path)
    names = _read_names(source)
    if names and attribute not in names:
        nearest = difflib.get_close_matches(attribute, names, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        message = f"{kind} {path!r}: module {module_name!r} has no attribute {attribute!r}{hint}"
        raise ConfigError(message, key=key, value=path, suggestions=nearest)


def _find_source(module: str) -> Path | None:
    """Return the file or folder of a module; None if there is none. Packages that it is in are not imported."""
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top) if top else None
    if spec is None or not parts:
        return None if spec is None else Path(spec.origin or "")
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    if not all(root.is_dir() for root in roots):  # such as in an archive
        return Path()
    places = [root.joinpath(*parts) for root in roots]
    exact = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"), place)]
    compiled = (file for place in places for file in place.parent.glob(f"{place.name}.*"))
    return next((file for file in (*exact, *compiled) if file.exists()), None)


def _read_names(source: Path) -> set[str]:
    """Return the names in a module's source; an empty set if the module may have others, or the source cannot be read."""
    if source.suffix != ".py":
        return set()
    try:
        text = source.read_text(encoding="utf-8")
        names = set(symtable.symtable(text, str(source), "exec").get_identifiers())
    except (OSError, ValueError, SyntaxError):  # the import will report it
        return set()
    makes_others = "import *" in text or names & {"__getattr__", "globals", "setattr", "exec", "vars"}
    return set() if makes_others else names


def bind_options(function: Callable[..., Any], options: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """Return a function with options bound to its keyword-only parameters.

    Args:
        function: The function. One with a parameter `**options` takes any option.
        options: Value of each option.
        key: Dotted key that the configuration has the options under, for the error.

    Raises:
        ConfigError: The function does not take an option, or needs one that is missing.
    """
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise ConfigError(f"{name} is no function, but {type(function).__name__}", key=key)
    everything = inspect.signature(function).parameters.values()
    parameters = [each for each in everything if each.kind is each.KEYWORD_ONLY]
    takes_any, valid = any(each.kind is each.VAR_KEYWORD for each in everything), [each.name for each in parameters]
    takes = f"its keyword-only parameters are {', '.join(valid)}" if valid else "it has no keyword-only parameters"
    for option, value in options.items():
        if option not in valid and not takes_any:
            nearest = difflib.get_close_matches(option, valid, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            message = f"{name} takes no option {option!r}{hint}: {takes}"
            raise ConfigError(message, key=f"{key}.{option}", value=value, valid=valid, suggestions=nearest)
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in options:
            message = f"{name} needs the option {parameter.name!r}: {takes}"
            raise ConfigError(message, key=key, value=dict(options), valid=valid)
    return functools.partial(function, **options) if options else function
