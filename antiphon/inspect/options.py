"""All configuration keys with type, default, bounds and meaning, from the configuration models themselves."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from antiphon.core.config import Config

_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Option:
    """One key of a configuration."""

    key: str  # dotted; `[]` marks the items of a list
    type: str  # with its bounds
    unit: str  # of a number
    default: str  # as YAML has it; empty if the key is required
    meaning: str

    def __str__(self) -> str:
        default = f"default {self.default}" if self.default else "required"
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.key}\n    {self.type}{unit}, {default}\n    {self.meaning}"


def list_options(model: type[Config]) -> list[Option]:
    """Return the keys of a configuration model, in the order of the models.

    A section is counted only if it may be null; a list of sections is, and so is each key of its items, once.
    """
    schema = model.model_json_schema()
    return list(_walk(schema, schema.get("$defs", {}), ""))


def find_options(model: type[Config], key: str) -> list[Option]:
    """Return the option `key`, or those below it; all if it is empty."""
    wanted = key.replace("[]", "").rstrip(".")
    return [
        option
        for option in list_options(model)
        if not wanted or f"{option.key.replace('[]', '')}.".startswith(f"{wanted}.")
    ]


def _walk(schema: Schema, definitions: Schema, path: str, given: Any = None) -> Iterator[Option]:
    """Yield the options below a schema.

    Args:
        schema: Schema of the value at `path`.
        definitions: Schemas that it refers to.
        path: Dotted key.
        given: Its default in the default of the section around it, which holds.
    """
    if given is not None:
        schema = {**schema, "default": given}
    branches = list(_branches(schema, definitions))
    sections = [branch for branch in branches if "properties" in branch]
    if not sections or any(branch.get("type") == "null" for branch in branches):
        default = json.dumps(schema["default"], ensure_ascii=False) if "default" in schema else ""
        meaning = " ".join(schema.get("description", "").split())
        types = " or ".join(map(_describe_type, branches))
        unit = next((each["unit"] for each in (schema, *branches) if "unit" in each), "")
        yield Option(path, types, unit, default, meaning)
    for kind, options in schema.get("kinds", {}).items():
        for option in _walk(options, options.get("$defs", {}), path):
            yield replace(option, meaning=f"Of `kind: {kind}`. {option.meaning}")
    for section in sections:
        for name, field in section["properties"].items():
            inner = (schema.get("default") or {}).get(name)
            yield from _walk(field, definitions, f"{path}.{name}".lstrip("."), inner)
    items = [part for branch in branches for part in _branches(branch.get("items", {}), definitions)]
    lists = [part for part in items if "properties" in part]
    for part in lists:
        for name, field in part["properties"].items():
            yield from _walk(field, definitions, f"{path}[].{name}")


def _branches(schema: Schema, definitions: Schema) -> Iterator[Schema]:
    """Yield the alternatives of a schema, with references resolved."""
    if reference := schema.get("$ref"):
        yield from _branches(definitions[reference.rpartition("/")[2]], definitions)
        return
    alternatives = schema.get("anyOf") or schema.get("allOf") or schema.get("oneOf")
    if alternatives:
        for each in alternatives:
            yield from _branches(each, definitions)
    else:
        yield schema


def _describe_type(schema: Schema) -> str:
    if "properties" in schema:
        return "section"
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type", "any")
    if kind == "array":
        parts = schema.get("prefixItems") or [schema["items"]] if "items" in schema or "prefixItems" in schema else []
        inner = ", ".join("sections" if "$ref" in part else _describe_type(part) for part in parts)
        return f"list of {inner}" if inner else "list"
    bounds = " ".join(f"{sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema)
    names = {"integer": "integer", "number": "number", "string": "text", "boolean": "true | false", "object": "mapping"}
    return f"{names.get(kind, kind)} {bounds}".strip()
