"""Pickles that hold data only, for what is read from a process that may have seen a model's output.

`pickle` calls whatever a message names, and lets it set attributes of whatever is there. Here a message can only name classes
that hold values: dataclasses, enumerations, named tuples, pydantic and msgspec models and errors, of Antiphon or of the user's
own modules, and a few of the standard library. Arrays and tensors are sent as bytes with their type. Nothing of a library is
called, no constructor of a dataclass runs, and no class, function or member of an enumeration can be changed.

Workers in environments of their own import this module, so it needs the standard library alone.
"""

import io
import pickle
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

OUR_PACKAGES = (
    "antiphon",
    "antiphon_envs",
)  # a message may have their modules imported; those of others must be already
_ARRAY_KINDS = "biufcmMSU"  # of numpy's dtypes: those whose items are plain bytes
_ALLOWED = {
    "antiphon.core.types.streams": {"Streams"},
    "antiphon.tasks.base": {"Transcript"},
    "builtins": {"complex", "range", "slice"},
    "collections": {"OrderedDict"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "torch": {"device"},
    "uuid": {"UUID"},
}
_FACTORIES = {"dict", "float", "int", "list", "set", "str", "tuple"}  # of a defaultdict, which arrives as a dict
_IMMUTABLE_TYPE, _HEAP_TYPE = 1 << 8, 1 << 9  # flags of a class
_known: dict[tuple[str, str], Any] = {}  # what messages have named, by module and name


def dump_data(value: Any) -> bytes:
    """Return the pickle of a value; `pickle.PicklingError` if it holds an array of another kind than numbers and texts."""
    content = io.BytesIO()
    _DataPickler(content, pickle.HIGHEST_PROTOCOL).dump(value)
    return content.getvalue()


def load_data(content: bytes) -> Any:
    """Return the data of a pickle that `dump_data` made.

    Raises:
        pickle.UnpicklingError: It names something that is not data. A pickle that is none raises this or any other error.
    """
    return _DataUnpickler(io.BytesIO(content)).load()


def check_data(value: Any) -> None:
    """Check that a value could be sent; any error says why it cannot."""
    load_data(dump_data(value))


# --- arrays and tensors ------------------------------------------------------------------------------------------------


class _DataPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Return what rebuilds an array, a number of numpy or a tensor; other values have their own ways."""
        kind = type(value)
        if kind.__module__ == "numpy":
            if kind.__name__ == "ndarray":
                _require_plain(value.dtype)
                return rebuild_array, (value.dtype.str, value.shape, value.tobytes())
            if hasattr(value, "dtype"):
                _require_plain(value.dtype)
                return rebuild_number, (value.dtype.str, value.tobytes())
        elif kind.__module__ in ("torch", "torch.nn.parameter") and kind.__name__ in ("Tensor", "Parameter"):
            plain = value.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
            return rebuild_tensor, (
                str(value.dtype).removeprefix("torch."),
                tuple(value.shape),
                plain.numpy().tobytes(),
            )
        return NotImplemented


def _require_plain(dtype: Any) -> None:
    if dtype.kind not in _ARRAY_KINDS:
        raise pickle.PicklingError(f"an array of {dtype} is not data")


def rebuild_array(name: str, shape: tuple[int, ...], content: bytes) -> Any:
    """Return an array of its dtype's name, shape and bytes."""
    import numpy as np

    dtype = np.dtype(str(name))  # no message can hold one: with it, numpy would read an array from any memory
    _require_plain(dtype)
    if not content:  # numpy reads no empty buffer
        return np.zeros(0, dtype).reshape(shape)
    return np.frombuffer(bytearray(content), dtype).reshape(shape)


def rebuild_number(name: str, content: bytes) -> Any:
    """Return a number of numpy, of its dtype's name and bytes."""
    return rebuild_array(name, (), content)[()]


def rebuild_tensor(name: str, shape: tuple[int, ...], content: bytes) -> Any:
    """Return a tensor of its dtype's name, shape and bytes."""
    torch = import_module("torch")  # only where a message has a tensor
    dtype = getattr(torch, str(name))
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError(f"{name} is no dtype")
    flat = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)  # one byte, so that it cannot grow later
    return flat[: len(content)].view(dtype).reshape(shape)


def rebuild_dict(factory: object = None) -> dict[Any, Any]:
    """Return the empty dict that a message then fills, in place of a defaultdict."""
    return {}


def rebuild_counter(counts: object = None) -> Counter[Any]:
    """Return a counter of the dict that it was sent as."""
    return Counter(counts if type(counts) is dict else {})


def _refuse_call(*args: object) -> None:
    raise pickle.UnpicklingError("a message may not call this")


def rebuild_member(enumeration: Any, name: str) -> Enum:
    """Return a member of an enumeration, or of the stand-in for one, by its name."""
    found = getattr(enumeration, "_guarded", enumeration)
    if not (isinstance(found, type) and issubclass(found, Enum)):
        raise pickle.UnpicklingError("getattr is called with what is no enumeration")
    return found[name]


# --- reading -----------------------------------------------------------------------------------------------------------


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _known.get((module, name))
        if found is None:
            found = _known[module, name] = self._find(module, name)
        return found

    def _find(self, module: str, name: str) -> Any:
        if (module, name) in _FUNCTIONS:
            return _Function(_FUNCTIONS[module, name])
        if module == "builtins" and name in _FACTORIES:
            return _Function(_refuse_call)  # only passed to that of a defaultdict
        if name in _ALLOWED.get(module, ()):
            return _guard(super().find_class(module, name))
        if "__" not in name and _may_name(module):
            found = super().find_class(module, name)
            if _is_data(found):
                return _guard(found)
        raise pickle.UnpicklingError(f"{module}.{name} is not a class of data that a message may name")


def _may_name(module: str) -> bool:
    """Return whether messages may name classes of a module: of ours, of the user's, Python's errors and torch's dtypes."""
    if module.partition(".")[0] in OUR_PACKAGES:
        return not module.endswith("__main__")
    if module in ("__main__", "builtins", "torch"):
        return module in sys.modules
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not any(Path(file).is_relative_to(folder) for folder in _library_folders())


@cache
def _library_folders() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({Path(sysconfig.get_path(name)) for name in names})


def _is_data(found: Any) -> bool:
    """Return whether this is a class that only holds values, or a dtype of torch."""
    if not isinstance(found, type):
        return "torch" in sys.modules and isinstance(found, sys.modules["torch"].dtype)
    if issubclass(found, Exception):
        return True
    if any("__call__" in vars(each) for each in found.__mro__):
        return False
    if issubclass(found, Enum):
        return bool(found.__members__)  # one without members makes new classes when it is called
    named_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
    return (
        is_dataclass(found)
        or named_tuple
        or hasattr(found, "__struct_fields__")
        or hasattr(found, "__pydantic_fields__")
    )


def _refuse_state(self: Any, state: Any) -> None:
    raise pickle.UnpicklingError(f"a message may not change {self!r}")


class _Function:
    """A function that messages call; one of Python's own could be changed by a message."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_state(self, value)

    __setstate__ = _refuse_state


class _Guard(type):
    """Type of a stand-in for a class: it makes instances of that class, whose attributes a pickle could set otherwise."""

    _guarded: type

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if is_dataclass(cls._guarded):
            raise pickle.UnpicklingError(f"a message may not call {cls._guarded.__qualname__}")
        return cls._guarded(*args, **options)

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"a message may not set {cls._guarded.__qualname__}.{name}")


def _guard(found: Any) -> Any:
    """Return what a message gets for a class: a stand-in, if it can be changed."""
    if not isinstance(found, type) or not found.__flags__ & _HEAP_TYPE or found.__flags__ & _IMMUTABLE_TYPE:
        return found
    if issubclass(found, Enum):  # its members are shared by all
        type.__setattr__(found, "__setstate__", _refuse_state)

    def make(_: type, *args: Any, **options: Any) -> Any:
        return found.__new__(found, *args, **options)

    return _Guard(found.__name__, (), {"_guarded": found, "__new__": make})


_FUNCTIONS: Mapping[tuple[str, str], Callable[..., Any]] = {
    **{(__name__, each.__name__): each for each in (rebuild_array, rebuild_number, rebuild_tensor)},
    ("builtins", "getattr"): rebuild_member,  # so the members of enumerations are pickled up to Python 3.11.3
    ("collections", "Counter"): rebuild_counter,
    ("collections", "defaultdict"): rebuild_dict,
}
