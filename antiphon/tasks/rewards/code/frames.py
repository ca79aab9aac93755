"""Transfer plain values between the tests and a solution, as JSON in frames of bounded size.

Both processes have this file; `code.harness` is the judge's side, `code.solution` the other one. A value arrives as what the
receiver made of it, of exactly these types: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set,
frozenset, dict, range, slice, Fraction, Decimal, dates and times, deque, Counter, OrderedDict, views of dicts, the types
of these, Ellipsis and NotImplemented. All else crosses as a number, by which its owner is asked what can be done with it.

The judge reads what a hostile process may have written, so `decode` takes nothing on trust: an unknown tag, a content of
another type, a repeated key, too deep a nesting or too large a frame is a `FrameError`.

This file is read as text, and imports nothing of ours.
"""

import abc
import collections
import datetime
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

HEADER = struct.Struct("<I")
LARGEST_FRAME = 16 << 20  # bytes
CHUNK = 1 << 16  # bytes that are read at once, which is what a pipe holds
DEEPEST = 100  # containers in containers
SMALL = 1 << 62  # integers below are JSON's own

# Methods by which tests tell what kind of object they have: `callable`, `hasattr`, `isinstance` with an abstract class.
_ABILITIES = """
    __abs__ __aenter__ __aexit__ __aiter__ __anext__ __await__ __bytes__ __call__ __complex__ __contains__ __enter__ __exit__
    __float__ __fspath__ __getitem__ __index__ __int__ __iter__ __len__ __next__ __reversed__ __round__
"""
ABILITIES = frozenset(_ABILITIES.split())

Number = Callable[[Any, str], Any]  # the tag and number of a value that is not plain
Named = Callable[[str, Any], Any]  # the value of a tag that is not of a plain value


class FrameError(Exception):
    """A message that is none, or a value that cannot cross."""


# --- from a value to JSON --------------------------------------------------------------------------------------------------

TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        list,
        tuple,
        set,
        frozenset,
        dict,
        range,
        slice,
        object,
    )
}
TYPES |= {"NoneType": type(None), "Fraction": Fraction, "Decimal": Decimal}
TYPE_NAMES = {kind: name for name, kind in TYPES.items()}
SINGLE = {"ellipsis": ..., "notimplemented": NotImplemented}
SCALARS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    complex: ("complex", lambda c: [_float(c.real), _float(c.imag)]),
    bytes: ("bytes", lambda b: bytes.hex(b)),
    bytearray: ("bytearray", lambda b: bytearray.hex(b)),
    Fraction: ("fraction", lambda f: [hex(f.numerator), hex(f.denominator)]),
    Decimal: ("decimal", lambda d: Decimal.__str__(d)),
    range: ("range", lambda r: [hex(r.start), hex(r.stop), hex(r.step)]),
    datetime.datetime: ("datetime", lambda d: datetime.datetime.isoformat(d)),
    datetime.date: ("date", lambda d: datetime.date.isoformat(d)),
    datetime.time: ("time", lambda t: datetime.time.isoformat(t)),
    datetime.timedelta: ("timedelta", lambda t: [t.days, t.seconds, t.microseconds]),
}
SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
    type({}.keys()): "keys",
    type({}.values()): "values",
}
MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordered",
    collections.Counter: "counter",
    type({}.items()): "items",
}
# What an instance of a subclass is taken for, the first that fits.
BASES: tuple[type, ...] = (str, int, float, *SCALARS, *SEQUENCES, *sorted(MAPPINGS, key=lambda kind: kind is dict))


def encode(value: Any, number: Number, depth: int = 0) -> Any:
    """Return the JSON of a value. Instances of subclasses become their plain base; `number` is asked for what is not plain."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is int:
        return value if -SMALL < value < SMALL else ["int", hex(value)]
    if kind is float:
        return _float(value)
    if depth > DEEPEST:
        raise FrameError(f"a value is nested deeper than {DEEPEST}")
    depth += 1
    if kind in SEQUENCES:
        return [SEQUENCES[kind], [encode(item, number, depth) for item in value]]
    if kind in MAPPINGS:
        items = value if MAPPINGS[kind] == "items" else kind.items(value)
        return [MAPPINGS[kind], [[encode(key, number, depth), encode(item, number, depth)] for key, item in items]]
    if kind in SCALARS:
        name, to = SCALARS[kind]
        return [name, to(value)]
    if kind is slice:
        return ["slice", [encode(part, number, depth) for part in (value.start, value.stop, value.step)]]
    return _encode_other(value, number, depth)


def _encode_other(value: Any, number: Number, depth: int) -> Any:
    """Return the JSON of what has none of the exact types."""
    if type(value) in (type, abc.ABCMeta) and value in TYPE_NAMES:
        return ["type", TYPE_NAMES[value]]
    for name, single in SINGLE.items():
        if value is single:
            return [name, None]
    base = None if isinstance(value, Iterator) else next((base for base in BASES if isinstance(value, base)), None)
    if base is not None:
        return _encode_as(base, value, number, depth)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), number, depth)
    return number(value, "iterator" if isinstance(value, Iterator) else "kept")


def _encode_as(base: Any, value: Any, number: Number, depth: int) -> Any:
    """Return the JSON of an instance of a subclass, without a method of its own."""
    if base in MAPPINGS:
        items = value if MAPPINGS[base] == "items" else dict.items(value)
        return [MAPPINGS[base], [[encode(key, number, depth), encode(item, number, depth)] for key, item in items]]
    if base in SEQUENCES:
        return [SEQUENCES[base], [encode(item, number, depth) for item in base.__iter__(value)]]
    if base is str:
        return str.__str__(value)
    if base is int:
        return encode(int.__int__(value), number, depth)
    if base is float:
        return _float(float.__float__(value))
    name, to = SCALARS[base]
    return [name, to(value)]


def _float(value: float) -> Any:
    return value if math.isfinite(value) else ["float", repr(value)]


# --- from JSON to a value --------------------------------------------------------------------------------------------------


def decode(data: Any, named: Named, depth: int = 0) -> Any:
    """Return the value of untrusted JSON.

    `named` makes values of the tags that it knows, and raises `FrameError` for others.
    """
    kind = type(data)
    if kind is str or kind is bool or kind is int or kind is float or data is None:
        return data
    if kind is not list or len(data) != 2 or type(data[0]) is not str:
        raise FrameError("neither a plain value nor a tagged one")
    if depth > DEEPEST:
        raise FrameError(f"a value is nested deeper than {DEEPEST}")
    tag, content = data
    if tag in READ_SCALARS:
        shape, back = READ_SCALARS[tag]
        return back(_shaped(content, shape))
    if tag in READ_SEQUENCES:
        return _whole(READ_SEQUENCES[tag]([decode(item, named, depth + 1) for item in _list(content)]), len(content))
    if tag in READ_MAPPINGS:
        pairs = [_list(pair, 2) for pair in _list(content)]
        read = [(decode(key, named, depth + 1), decode(item, named, depth + 1)) for key, item in pairs]
        return _whole(READ_MAPPINGS[tag](read), len(read))
    if tag == "slice":
        return slice(*(decode(part, named, depth + 1) for part in _list(content, 3)))
    if tag == "type":
        return TYPES[_shaped(content, str)]
    if tag in SINGLE:
        return SINGLE[tag]
    return named(tag, content)


READ_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "keys": lambda items: dict.fromkeys(items).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
}
READ_MAPPINGS: dict[str, Callable[[Iterable[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "counter": lambda items: collections.Counter(dict(items)),
    "items": lambda items: dict(items).items(),
}


def _integers(parts: list[str]) -> list[int]:
    return [int(_shaped(part, str), 16) for part in parts]


def _days(parts: list[int]) -> datetime.timedelta:
    return datetime.timedelta(*(_shaped(part, int) for part in _list(parts, 3)))


READ_SCALARS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "int": (str, lambda text: int(text, 16)),
    "float": (str, lambda text: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text] * 1.0),
    "complex": (list, lambda parts: complex(*(_shaped(decode(part, _nothing), float) for part in _list(parts, 2)))),
    "bytes": (str, bytes.fromhex),
    "bytearray": (str, bytearray.fromhex),
    "fraction": (list, lambda parts: Fraction(*_integers(_list(parts, 2)))),
    "decimal": (str, Decimal),
    "range": (list, lambda parts: range(*_integers(_list(parts, 3)))),
    "datetime": (str, datetime.datetime.fromisoformat),
    "date": (str, datetime.date.fromisoformat),
    "time": (str, datetime.time.fromisoformat),
    "timedelta": (list, _days),
}


def _shaped(content: Any, kind: type) -> Any:
    if type(content) is not kind:
        raise FrameError(f"expected {kind.__name__}, found {type(content).__name__}")
    return content


def _list(content: Any, length: int | None = None) -> list[Any]:
    found: list[Any] = _shaped(content, list)
    if length is not None and len(found) != length:
        raise FrameError(f"expected {length} parts, found {len(found)}")
    return found


def _whole(value: Any, count: int) -> Any:
    if len(value) != count:
        raise FrameError("an element or a key is there twice")
    return value


def _nothing(tag: str, content: Any) -> Any:
    raise FrameError(f"unknown tag {tag[:20]!r}")


def checked(read: Callable[..., Any], *arguments: Any) -> Any:
    """Call `read`; whatever goes wrong in it is a `FrameError`."""
    try:
        return read(*arguments)
    except FrameError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise FrameError(f"{type(error).__name__}: {str(error)[:200]}") from None


# --- frames ----------------------------------------------------------------------------------------------------------------


def send(descriptor: int, message: Any) -> None:
    """Write a message to a pipe. `FrameError` if it is too large."""
    data = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(data) > LARGEST_FRAME:
        raise FrameError(f"a message has {len(data)} bytes, the most is {LARGEST_FRAME}")
    left = memoryview(HEADER.pack(len(data)) + data)
    while left:
        left = left[os.write(descriptor, left) :]


def receive(descriptor: int) -> dict[str, Any]:
    """Read the next message of a pipe. `EOFError` at the end, `FrameError` if it is none."""
    (length,) = HEADER.unpack(_read(descriptor, HEADER.size))
    if length > LARGEST_FRAME:
        raise FrameError(f"a message has {length} bytes, the most is {LARGEST_FRAME}")
    data = _read(descriptor, length)
    message = checked(lambda: json.loads(data.decode("ascii"), parse_constant=_constant))
    found: dict[str, Any] = _shaped(message, dict)
    return found


def _read(descriptor: int, count: int) -> bytes:
    parts, left = list[bytes](), count
    while left:
        parts.append(os.read(descriptor, min(left, CHUNK)))
        if not parts[-1]:
            raise EOFError
        left -= len(parts[-1])
    return b"".join(parts)


def _constant(text: str) -> Any:
    raise FrameError(f"{text} is no number of JSON")
