"""Mistakes in a configuration, from the errors of its validation: each with its place, its value and what is valid."""

import difflib
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from antiphon.core.config_document import ConfigDocument, dotted, shorten
from antiphon.core.errors import Mistake, ValidatorError
from antiphon.core.yaml_text import Keys


def find_mistakes(error: ValidationError, document: ConfigDocument, model: type[BaseModel]) -> Iterator[Mistake]:
    """Yield each mistake once, with the place that its value was given at."""
    items = error.errors(include_url=False)
    places = [tuple(item["loc"]) for item in items]
    seen: set[str] = set()
    for item in items:
        here = tuple(item["loc"])
        if any(place[: len(here)] == here != place for place in places):
            continue  # pydantic also reports the whole when a part of it is wrong
        for keys, mistake in _describe(item, document, model):
            path = document.origin(keys) if keys else document.source
            value = document.get(keys) if document.has(keys) else mistake.value
            located = replace(mistake, key=dotted(keys), value=value, path=path)
            if str(located) not in seen:
                seen.add(str(located))
                yield located


def _describe(item: Any, document: ConfigDocument, model: type[BaseModel]) -> Iterator[tuple[Keys, Mistake]]:
    """Yield the path and a mistake for each problem that one validation error names."""
    keys: Keys = tuple(item["loc"])
    kind = item["type"]
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, ValidatorError):
        for mistake in cause.mistakes:
            yield (*keys, *(int(part) if part.isdigit() else part for part in mistake.key.split(".") if part)), mistake
    elif kind == "extra_forbidden":
        yield keys, describe_unknown_key(keys, model)
    elif kind == "missing":
        yield keys, Mistake("", f"is missing{_field_description(keys, model)}")
    else:
        keys = _without_union_members(keys, document)
        message = str(cause) if cause is not None else item["msg"].removeprefix("Input ")
        yield keys, Mistake("", f"{message}, not {shorten(document.get(keys))}")


def _without_union_members(keys: Keys, document: ConfigDocument) -> Keys:
    """Return `keys` without the parts that pydantic adds to tell the members of a union apart."""
    known: Keys = ()
    for key in keys:
        try:
            document.get((*known, key))
        except KeyError:
            continue
        known = (*known, key)
    return known


def describe_unknown_key(keys: Keys, model: type[BaseModel]) -> Mistake:
    """Return the mistake of a key that the model at its place does not have, with the nearest valid ones."""
    owner = _model_at(keys[:-1], model)
    valid = list(owner.model_fields) if owner else []
    key = str(keys[-1])
    # A key that exists in another place was put in the wrong one; only then is it a misspelt one of this place.
    elsewhere = [path for path, name in _paths(model, "") if name == key][:3]
    hints = elsewhere or difflib.get_close_matches(key, valid, n=1)
    hint = f"; did you mean {' or '.join(map(repr, hints))}?" if hints else "."
    message = f"there is no such key{hint} Valid here: {', '.join(valid) or 'none'}"
    return Mistake(dotted(keys), message, valid=tuple(valid), suggestions=tuple(hints))


def _field_description(keys: Keys, model: type[BaseModel]) -> str:
    """Return the documentation of a field in parentheses; empty if there is none."""
    owner = _model_at(keys[:-1], model)
    field = owner.model_fields.get(str(keys[-1])) if owner else None
    return f" ({field.description.rstrip('.')})" if field and field.description else ""


def _model_at(keys: Keys, model: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model that holds the value at `keys`; None for a plain mapping or value."""
    at: type[BaseModel] | None = model
    for key in keys:
        if isinstance(key, int):
            continue  # the item of a list is of the model that the list's own key names
        field = at.model_fields.get(key) if at else None
        at = _model_in(field.annotation) if field else None
    return at


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for part in typing.get_args(annotation) if (found := _model_in(part))), None)


def iterate_sections(model: type[BaseModel], keys: Keys = ()) -> Iterator[tuple[Keys, type[BaseModel]]]:
    """Yield the path and the model of every section of a model that is not an item of a list."""
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner and typing.get_origin(field.annotation) is not tuple:
            yield (*keys, name), inner
            yield from iterate_sections(inner, (*keys, name))


def _paths(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the name of every key of a model."""
    for name, field in model.model_fields.items():
        yield prefix + name, name
        inner = _model_in(field.annotation)
        if inner:
            item = "0." if typing.get_origin(field.annotation) is tuple else ""
            yield from _paths(inner, f"{prefix}{name}.{item}")
