"""Digests of Python objects that stay equal when the same code is run again, in another process or notebook.

The pickle of a function differs from process to process, so a digest is made of source text, defaults, closures and the
functions and values of its script that it refers to.
"""

import contextlib
import functools
import hashlib
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

DIGEST_BYTES = 6
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def fingerprint(value: Any) -> str:
    """Return 12 hexadecimal digits of an object: of its code, and of the values that the code was made with."""
    return digest_parts(_describe(value, set()))


def digest_parts(parts: Iterable[str | bytes | memoryview]) -> str:
    """Return 12 hexadecimal digits of a sequence of texts or bytes."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _describe(value: Any, seen: set[int]) -> Iterator[str | bytes]:
    """Yield the parts that make up a value; one that was seen already, as in a recursion, is left out."""
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
        return
    if id(value) in seen:
        yield "seen"
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        yield f"mapping {len(value)}"
        for key, item in value.items():
            yield from _describe(key, seen)
            yield from _describe(item, seen)
    elif isinstance(value, list | tuple):
        yield f"sequence {len(value)}"
        for item in value:
            yield from _describe(item, seen)
    elif isinstance(value, set | frozenset):
        yield from sorted(map(repr, value))
    else:
        yield from _describe_code(value, seen)


def _describe_code(value: Any, seen: set[int]) -> Iterator[str | bytes]:
    if isinstance(value, functools.partial):
        yield from _describe((value.func, value.args, value.keywords), seen)
    elif isinstance(value, types.MethodType):
        yield from _describe((value.__func__, value.__self__), seen)
    elif isinstance(value, types.FunctionType):
        yield from _describe_function(value, seen)
    elif isinstance(value, type):
        yield from _describe_class(value, seen)
    elif isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        yield f"{value.__name__}"
    elif type(value).__module__ == "__main__" or callable(value):
        yield from _describe_class(type(value), seen)
        yield from _describe(getattr(value, "__dict__", {}), seen)
    else:
        import cloudpickle

        yield cloudpickle.dumps(value)


def _describe_function(function: types.FunctionType, seen: set[int]) -> Iterator[str | bytes]:
    yield f"function {function.__module__}:{function.__qualname__}"
    source = _source(function) if function.__name__ != "<lambda>" else ""  # a line may hold several lambdas
    yield source
    code = function.__code__
    if not source:
        yield from _describe_bytecode(code)
    yield from _describe((function.__defaults__, function.__kwdefaults__), seen)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield from _describe(cell.cell_contents, seen)
    for name in sorted(_global_names(code)):
        used = function.__globals__.get(name)
        if isinstance(used, _PLAIN) or getattr(used, "__module__", None) == function.__module__:
            yield name
            yield from _describe(used, seen)


def _describe_class(cls: type, seen: set[int]) -> Iterator[str | bytes]:
    yield f"class {cls.__module__}:{cls.__qualname__}"
    if not (source := _source(cls)):
        members = {name: item for name, item in vars(cls).items() if not name.startswith("__") or callable(item)}
        for name, member in sorted(members.items()):
            yield name
            if isinstance(member, (types.FunctionType, type, *_PLAIN)):
                yield from _describe(member, seen)
    yield source


def _describe_bytecode(code: types.CodeType) -> Iterator[str | bytes]:
    yield code.co_code
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _describe_bytecode(constant)
        else:
            yield repr(constant)


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes that a function uses, nested functions included."""
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_global_names, nested))


def _source(value: Any) -> str:
    """Return the source text of a function or class; empty if there is none, as for what was typed into an interpreter."""
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        return ""
