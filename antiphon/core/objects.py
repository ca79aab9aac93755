"""Python objects in the place of names, for configurations that are made in Python.

A configuration holds names. An object that has an import path is named by that path. Every other one, such as a function of a
notebook, is *attached*: it gets the name `module:qualname@digest` and is kept in this process under it. Worker processes get
attached objects with the message that starts them, as bytes of cloudpickle; nothing is sent back that way. A name that is not
attached here, because it was read from the record of a run, is refused when it is resolved.
"""

import functools
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.fingerprint import fingerprint

_NAME = re.compile(r"[\w.]+:[\w.<>]+@[0-9a-f]{12}")


@dataclass(slots=True)
class _Attached:
    """An attached object, its pickle, or both."""

    value: Any = None
    pickle: bytes | None = None  # None if the object stays in this process
    is_loaded: bool = True


_ATTACHED: dict[str, _Attached] = {}  # by name; a name has the digest of its object, so that none is ever replaced


def is_attached_name(name: str) -> bool:
    """Return True if `name` has the form of the name of an attached object."""
    return _NAME.fullmatch(name) is not None


def is_attached(name: str) -> bool:
    """Return True if `name` is that of an object which is attached to this process."""
    return name in _ATTACHED


def stays_here(name: str) -> bool:
    """Return True if `name` is that of an attached object which worker processes do not get."""
    return name in _ATTACHED and _ATTACHED[name].pickle is None


def name_object(value: Any, key: str) -> str:
    """Return a name for an object: its import path, or that under which it is now attached.

    Args:
        value: A function, a class, or an instance that can be called.
        key: Dotted key of the configuration that holds the object, for errors.

    Raises:
        ConfigError: It cannot be called, or cannot be sent to worker processes.
    """
    if not callable(value):
        message = f"is {type(value).__name__}; a value is plain data, or a function or class in the place of a name"
        raise ConfigError(message, key=key, value=value)
    module, qualname = _describe_origin(value)
    if find_in_module(module, qualname) is value:
        return f"{module}:{qualname}"
    content = _pickle(value, f"{module}:{qualname}", key)
    name = f"{module}:{qualname}@{fingerprint(value)}"
    _ATTACHED.setdefault(name, _Attached(value, content))
    return name


def attach_here(value: Any, origin: str, digest: str) -> str:
    """Attach an object that worker processes do not get, such as a data set; return its name.

    Args:
        value: The object.
        origin: `module:qualname` that describes it.
        digest: 12 hexadecimal digits, of its content.
    """
    name = f"{origin}@{digest}"
    _ATTACHED.setdefault(name, _Attached(value))
    return name


def resolve_attached(name: str, key: str = "") -> Any:
    """Return an attached object by its name.

    Raises:
        ConfigError: No such object is attached here, or it cannot be unpickled in this process.
    """
    entry = _ATTACHED.get(name)
    if entry is None:
        raise missing_object(name, key)
    if not entry.is_loaded:
        import cloudpickle

        try:
            entry.value, entry.is_loaded = cloudpickle.loads(entry.pickle or b""), True
        except Exception as error:  # named boundary: the object's own code
            message = f"{name!r} cannot be unpickled in a worker process: {type(error).__name__}: {error}"
            raise ConfigError(message, key=key, value=name) from error
    return entry.value


def missing_object(name: str, key: str) -> ConfigError:
    """Return the error about an attached object that this process does not have."""
    origin, _, digest = name.partition("@")
    message = (
        f"{origin!r} is a Python object that was passed to antiphon.train, and is not in a file that can be imported. "
        f"Pass the same object again from Python (its source had the digest {digest}), or move it to a module and name it "
        "package.module:attribute"
    )
    return ConfigError(message, key=key, value=name)


def pack_objects() -> dict[str, bytes]:
    """Return the attached objects for a worker process, pickled, by name."""
    return {name: entry.pickle for name, entry in _ATTACHED.items() if entry.pickle is not None}


def receive_objects(packed: Mapping[str, bytes]) -> None:
    """Attach what `pack_objects` returned in another process; an object is unpickled when it is resolved."""
    for name, content in packed.items():
        _ATTACHED.setdefault(name, _Attached(None, content, is_loaded=False))


def find_in_module(module: str, qualname: str) -> Any:
    """Return the attribute of an imported module; None if there is none, or the module is the script or notebook itself."""
    if module == "__main__" or not isinstance(sys.modules.get(module), types.ModuleType):
        return None
    return getattr(sys.modules[module], qualname, None)


def _describe_origin(value: Any) -> tuple[str, str]:
    """Return module and qualified name of a function or class, of what a `partial` calls, or of an instance's class."""
    while isinstance(value, functools.partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    return named.__module__ or "__main__", named.__qualname__


def _pickle(value: Any, name: str, key: str) -> bytes:
    import cloudpickle

    try:
        content: bytes = cloudpickle.dumps(value)
    except Exception as error:  # named boundary: the object, and what it refers to, may raise anything
        message = f"{name!r} cannot be sent to worker processes: {type(error).__name__}: {error}"
        raise ConfigError(message, key=key, value=name) from error
    return content
