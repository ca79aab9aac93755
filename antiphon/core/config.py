"""The loader: YAML and `a.b=c` overrides to a frozen model.

`load` reads a file, applies overrides and validates; `dump` writes what `load` reads back equal. Whatever is wrong is one
`ConfigError` with a line for each mistake: where it stands (file and line, or the override), the dotted path, the value,
and what would be valid. The YAML is version 1.2's in two places where 1.1 surprises: `1e-6` is a number, `on` a string.
"""

import difflib
import json
import os
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from antiphon.core.errors import ConfigError

MOST_CHARACTERS = 1 << 20  # of one YAML text
MOST_VALUES = 50_000  # in it, where an alias counts as all that it stands for

Keys = tuple[str | int, ...]  # the way to a value: keys of mappings, indices of lists
M = TypeVar("M", bound="Config")


class Config(BaseModel):
    """Base of every configuration model: frozen, no unknown keys. `load` also holds scalars to their types: "3" is no
    number there, and `true` no integer; an integer passes for a float and a list for a tuple."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants")


class Problems(ValueError):
    """What a model's validators found wrong: (dotted path from the model, message) each. Validators raise it, so that
    several mistakes are told at once and each with its place."""

    def __init__(self, items: Sequence[tuple[str, str]]) -> None:
        self.items = tuple(items)
        super().__init__("\n".join(f"{path}: {message}" for path, message in items))


def load(path: str | Path | None, overrides: Sequence[str] = (), *, model: type[M]) -> M:
    """The configuration in the YAML file `path`, changed by `overrides` such as `rollout.group_size=4`. Without a file, that of
    the defaults."""
    document = _Document("the defaults", {}, {}) if path is None else _Document.read(Path(path))
    for override in overrides:
        document.override(override)
    try:
        text = json.dumps(document.data)
    except (ValueError, TypeError) as error:  # what holds itself; a value that JSON has not, such as a !!set
        raise ConfigError(f"{path}: the YAML cannot be a tree of plain values: {error}") from error
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, document, model))) from error


def parse(model: type[M], options: Mapping[str, Any], key: str = "options") -> M:
    """Options under `key` whose model depends on what other keys say. Raises `Problems`, for validators."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        found = []
        for item in error.errors(include_url=False):
            keys = tuple(item["loc"])
            unknown = item["type"] == "extra_forbidden"
            found.append((_dotted((key, *keys)), _unknown(keys, model) if unknown else item["msg"]))
        raise Problems(found) from error


def dump(config: Config) -> str:
    """YAML of the whole configuration, defaults included; `load` gives back an equal model."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read_yaml(path: Path) -> Any:
    """Return the mapping in a YAML file as plain values. `ConfigError` if there is none, or it is too large."""
    return _Document.read(path).data


def add_import_folder(path: str | Path) -> None:
    """Put the folder of the file `path` on the import path, so that its YAML can name `module:attribute` beside it."""
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)


# --- YAML --------------------------------------------------------------------------------------------------------------

_FLOAT = re.compile(
    r"""[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.[0-9]+(?:[eE][-+]?[0-9]+)?)$
    |[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """The safe loader with scalars of YAML 1.2, and duplicate or non-string keys refused."""

    yaml_implicit_resolvers = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != f"{_TAG}str":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is not a string; quote it", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    f"{_TAG}int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """The safe dumper; it also quotes strings that only YAML 1.2 reads as numbers."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


def _parse(text: str, source: str) -> tuple[Any, yaml.Node | None]:
    """The value and the syntax tree of a YAML text; `ConfigError` names `source` and the line."""
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{source}: has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None and _count_values(node, {}) > MOST_VALUES:
            raise ConfigError(f"{source}: has more than {MOST_VALUES:,} values, its aliases written out")
        return (loader.construct_document(node) if node else None), node
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source}{line}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:  # the latter of a scalar, such as a number of 5,000 digits
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: cannot be a tree of plain values: nested too deeply, or in itself") from error


def _count_values(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Return how many values a node holds when each alias is written out. `RecursionError` for one that holds itself."""
    if node not in known:
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [value for _, value in node.value]
        known[node] = 1 + sum(_count_values(each, known) for each in inner)
    return known[node]


class _Document:
    """A parsed file with its overrides, and for every path the place that it was given at."""

    def __init__(self, source: str, data: dict[str, Any], origins: dict[Keys, str]) -> None:
        self.source = source
        self.data = data
        self.origins = origins

    @classmethod
    def read(cls, path: Path) -> "_Document":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
        data, node = _parse(text, str(path))
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: a configuration is a mapping of keys to values, this is {_say(data)}")
        return cls(str(path), data, {keys: f"{path}:{line}" for keys, line in _lines(node, (), ())})

    def override(self, override: str) -> None:
        """Apply `a.b=c`; the value is YAML, and an empty one is null."""
        dotted, equals, text = override.partition("=")
        parts = dotted.strip().split(".")
        if not equals or "" in parts:
            raise ConfigError(f"override {override!r}: write it as key=value, for example rollout.group_size=4")
        value, _ = _parse(text, f"override {override!r}")
        at: Any = self.data
        keys: Keys = ()
        for part in parts[:-1]:
            key = _key(at, keys, part, override)
            keys = (*keys, key)
            if isinstance(at, dict) and at.get(key) is None:
                at[key] = {}
                self.origins[keys] = f"override {override!r}"
            at = at[key]
        last = _key(at, keys, parts[-1], override)
        at[last] = value
        keys = (*keys, last)
        self.origins = {place: origin for place, origin in self.origins.items() if place[: len(keys)] != keys}
        self.origins[keys] = f"override {override!r}"

    def origin(self, keys: Keys) -> str:
        """Where the value at `keys`, or what should hold it, was given."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.origins:
                return self.origins[keys[:length]]
        return self.source

    def get(self, keys: Keys) -> Any:
        """The value at `keys`; `KeyError` if there is none."""
        at: Any = self.data
        for key in keys:
            inside = key in at if isinstance(at, dict) else isinstance(at, list) and key in range(len(at))
            if not inside:
                raise KeyError(key)
            at = at[key]
        return at


def _lines(node: yaml.Node | None, keys: Keys, above: tuple[yaml.Node, ...]) -> Iterator[tuple[Keys, int]]:
    """The line of every path below `node`, counted from 1."""
    if node is None or node in above:  # an anchor that holds itself; json refuses the value later
        return
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*keys, key.value), key.start_mark.line + 1
            yield from _lines(value, (*keys, key.value), (*above, node))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*keys, index), value.start_mark.line + 1
            yield from _lines(value, (*keys, index), (*above, node))


def _key(holder: Any, keys: Keys, part: str, override: str) -> str | int:
    """`part` as a key of `holder`, which is the value at `keys`."""
    if isinstance(holder, dict):
        return part
    where = f"override {override!r}: {_dotted(keys)}"
    if not isinstance(holder, list):
        raise ConfigError(f"{where} is {_say(holder)}; nothing can be set inside it")
    if not part.isdigit() or int(part) >= len(holder):
        raise ConfigError(f"{where} has {len(holder)} items, counted from 0; {part!r} is none of them")
    return int(part)


# --- messages ----------------------------------------------------------------------------------------------------------


def _explain(error: ValidationError, document: _Document, model: type[BaseModel]) -> Iterator[str]:
    """One line a mistake."""
    items = error.errors(include_url=False)
    places = [tuple(item["loc"]) for item in items]
    told: set[str] = set()
    for item in items:
        here = tuple(item["loc"])
        if any(place[: len(here)] == here != place for place in places):
            continue  # pydantic also complains of the whole when a part of it is wrong
        for keys, message in _messages(item, document, model):
            line = f"{document.origin(keys)}: {_dotted(keys)}: {message}" if keys else f"{document.source}: {message}"
            if line not in told:
                told.add(line)
                yield line


def _messages(item: Any, document: _Document, model: type[BaseModel]) -> Iterator[tuple[Keys, str]]:
    keys: Keys = tuple(item["loc"])
    kind = item["type"]
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, Problems):
        for path, message in cause.items:
            yield (*keys, *(int(part) if part.isdigit() else part for part in path.split(".") if part)), message
    elif kind == "extra_forbidden":
        yield keys, _unknown(keys, model)
    elif kind == "missing":
        yield keys, f"is missing{_described(keys, model)}"
    else:
        keys = _known(keys, document)
        message = str(cause) if cause is not None else item["msg"].removeprefix("Input ")
        yield keys, f"{message}, not {_say(document.get(keys))}"


def _known(keys: Keys, document: _Document) -> Keys:
    """`keys` without the parts that pydantic adds to tell the members of a union apart."""
    known: Keys = ()
    for key in keys:
        try:
            document.get((*known, key))
        except KeyError:
            continue
        known = (*known, key)
    return known


def _unknown(keys: Keys, model: type[BaseModel]) -> str:
    """What to say of a key that the model at its place does not have."""
    owner = _model_at(keys[:-1], model)
    valid = list(owner.model_fields) if owner else []
    key = str(keys[-1])
    # A key that exists in another place was put in the wrong one; only then is it a misspelt one of this place.
    elsewhere = [path for path, name in _paths(model, "") if name == key][:3]
    hints = elsewhere or difflib.get_close_matches(key, valid, n=1)
    hint = f"; did you mean {' or '.join(map(repr, hints))}?" if hints else "."
    return f"there is no such key{hint} Valid here: {', '.join(valid) or 'none'}"


def _described(keys: Keys, model: type[BaseModel]) -> str:
    owner = _model_at(keys[:-1], model)
    field = owner.model_fields.get(str(keys[-1])) if owner else None
    return f" ({field.description.rstrip('.')})" if field and field.description else ""


def _model_at(keys: Keys, model: type[BaseModel]) -> type[BaseModel] | None:
    """The model that holds the value at `keys`; None where a plain mapping or value stands."""
    at: type[BaseModel] | None = model
    for key in keys:
        if isinstance(key, int):
            continue  # the item of a list is of the model that the list's own key names
        field = at.model_fields.get(key) if at else None
        at = _model_in(field.annotation) if field else None
    return at


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for part in typing.get_args(annotation) if (found := _model_in(part))), None)


def _paths(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    """Dotted path and name of every key of a model."""
    for name, field in model.model_fields.items():
        yield prefix + name, name
        inner = _model_in(field.annotation)
        if inner:
            item = "0." if typing.get_origin(field.annotation) is tuple else ""
            yield from _paths(inner, f"{prefix}{name}.{item}")


def _dotted(keys: Keys) -> str:
    return ".".join(map(str, keys))


def _say(value: object) -> str:
    """A value as the user wrote it, shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def environment(*names: str) -> dict[str, str]:
    """Those of these environment variables that are set, for a program that is to have no others."""
    return {name: os.environ[name] for name in names if name in os.environ}


def set_environment(**variables: str) -> None:
    """Set environment variables, each unless the user has: for libraries that take a setting in no other way. It is here
    because nothing else in the package touches the environment."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def visible_gpus() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names; None if it is not set, and all are seen."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else [part.strip() for part in named.split(",") if part.strip()]


def set_visible_gpus(gpus: Sequence[str]) -> None:
    """Have this process see these GPUs alone, by the names of `visible_gpus`; to be called before CUDA is."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def read_secret(variable: str) -> str:
    """The value of an environment variable that holds what no file should; `ConfigError` if it is not set."""
    value = os.environ.get(variable, "")
    if not value:
        raise ConfigError(f"the environment variable {variable!r} is not set")
    return value
