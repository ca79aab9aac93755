"""Pickles that hold data only: what is read from a process that may have seen a model's output.

`pickle` calls whatever a message names. Here a message can only name classes that hold values (dataclasses, enumerations, named
tuples, pydantic and msgspec models, exceptions, some of the standard library) and what rebuilds arrays and tensors. A process
that a model's output has taken over thus cannot have its reader call a function, or change a class.
"""

import io
import pickle
import sys
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

OUR_PACKAGES = ("antiphon", "antiphon_envs")  # a message may have their modules imported, and those of the table
_PLAIN = (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple)
_ALLOWED = {
    "antiphon.core.types.streams": {"Streams"},
    "builtins": {each.__name__ for each in _PLAIN},
    "collections": {"Counter", "OrderedDict", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "torch": {"Size", "device"},
    "torch._utils": {"_rebuild_parameter", "_rebuild_tensor_v2"},
    "types": {"SimpleNamespace"},
    "uuid": {"UUID"},
}
_IMMUTABLE_TYPE, _HEAP_TYPE = 1 << 8, 1 << 9  # flags of a class
_known: dict[tuple[str, str], Any] = {}  # what messages have named, by module and name


def load_data(content: bytes) -> Any:
    """Return the data of a pickle.

    Raises:
        pickle.UnpicklingError: It names something that is not data. A pickle that is none raises this or any other error.
    """
    return _DataUnpickler(io.BytesIO(content)).load()


def check_data(value: Any) -> None:
    """Check that a value could be sent; any error says why it cannot."""
    load_data(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _known.get((module, name))
        if found is None:
            found = _known[module, name] = _guard(self._find(module, name))
        return found

    def _find(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):  # it would read any pickle
            torch = sys.modules[super().find_class("torch", "Size").__module__]
            return lambda content: torch.load(io.BytesIO(content), weights_only=True)
        if (module, name) == ("builtins", "getattr"):  # so the members of enumerations are pickled up to Python 3.11.3
            return _enumeration_member
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        ours = module.partition(".")[0] in OUR_PACKAGES and not module.endswith("__main__")
        if ours or module in sys.modules:
            found = super().find_class(module, name)
            if _is_data(found):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is not a class of data that this process has loaded")


def _is_data(found: Any) -> bool:
    """Return whether this is a class that only holds values, or a dtype of torch."""
    if not isinstance(found, type):
        return "torch" in sys.modules and isinstance(found, sys.modules["torch"].dtype)
    if issubclass(found, Enum | BaseException) or is_dataclass(found):
        return True
    named_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
    return named_tuple or hasattr(found, "__struct_fields__") or hasattr(found, "__pydantic_fields__")


def _enumeration_member(enumeration: Any, name: str) -> Enum:
    """Return a member of an enumeration, or of the stand-in for one, by its name."""
    found = getattr(enumeration, "_guarded", enumeration)
    if not (isinstance(found, type) and issubclass(found, Enum)):
        raise pickle.UnpicklingError("getattr is called with what is no enumeration")
    return found[name]


class _Guard(type):
    """Type of a stand-in for a class: it makes instances of that class, whose attributes a pickle could set otherwise."""

    _guarded: type

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return cls._guarded(*args, **options)

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"a message may not set {cls._guarded.__qualname__}.{name}")


def _guard(found: Any) -> Any:
    """Return what a message gets for a name; a class that can be changed is replaced by a stand-in."""
    if not isinstance(found, type) or not found.__flags__ & _HEAP_TYPE or found.__flags__ & _IMMUTABLE_TYPE:
        return found

    def make(_: type, *args: Any, **options: Any) -> Any:
        return found.__new__(found, *args, **options)

    return _Guard(found.__name__, (), {"_guarded": found, "__new__": make})
