"""Loading of configurations: YAML and `a.b=c` overrides to a frozen model.

`load` reads a file and the files that it names as its base (`core/config_document.py`), applies overrides and validates; `dump`
writes what `load` reads back equal. All mistakes are one `ConfigError` with a line for each: its place (file and line, or the
override), the dotted key, the value, and what would be valid.
"""

import copy
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from antiphon.core.config_document import ConfigDocument, dotted
from antiphon.core.config_messages import describe_unknown_key, find_mistakes, iterate_sections
from antiphon.core.errors import ConfigError, Mistake, ValidatorError
from antiphon.core.import_order import find_end_of_library
from antiphon.core.yaml_text import Keys, dump_yaml

M = TypeVar("M", bound="Config")
Bound = Annotated[float, Field(allow_inf_nan=True)]  # a number that may be infinite, as an element of a tuple


class Config(BaseModel):
    """Base of every configuration model: frozen, without unknown keys.

    `load` also holds scalars to their types: "3" is no number, and `true` no integer; an integer passes for a float and a
    list for a tuple. Numbers are finite, but for those in mappings of any values.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )

    SHORT_FOR: ClassVar[str] = ""
    """Key that is given by a plain text in place of the whole section; empty if none can stand there."""


def unit(name: str) -> Any:
    """Return the annotation of a number's unit, such as seconds, for `Annotated[float, ...]`."""
    return Field(json_schema_extra={"unit": name})


def options_by_kind(kinds: "Mapping[str, type[Config]]") -> Any:
    """Return the annotation of a mapping whose keys depend on the kind beside it: the model of each kind that has some."""
    return Field(json_schema_extra={"kinds": {kind: model.model_json_schema() for kind, model in kinds.items()}})


def load(
    path: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = (), *, model: type[M], bases: bool = True
) -> M:
    """Return the configuration in a YAML file or a mapping, changed by overrides.

    Args:
        path: The file, or a mapping of plain values; None begins with the defaults.
        overrides: Changes such as `rollout.group_size=4`.
        model: The type of the configuration.
        bases: Read the files that it names as its base; else `base` is an unknown key.

    Raises:
        ConfigError: Anything is wrong with it; the error has all mistakes.
    """
    document = read_document(path, overrides, model=model, bases=bases)
    try:
        text = json.dumps(document.data)
    except (ValueError, TypeError) as error:  # a value that holds itself, or that JSON lacks, such as a !!set
        raise ConfigError(f"the YAML cannot be a tree of plain values: {error}", path=document.source) from error
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigError.from_mistakes(find_mistakes(error, document, model)) from error


@contextmanager
def locate_mistakes(path: str | Path, overrides: Sequence[str] = (), *, model: type[Config] = Config) -> Iterator[None]:
    """Add the file and the line to mistakes that are found after `load`, which name their keys only."""
    try:
        yield
    except ConfigError as error:
        if all(mistake.path or not mistake.key for mistake in error.mistakes):
            raise
        document = read_document(path, overrides, model=model)

        def locate(mistake: Mistake) -> Mistake:
            keys = tuple(int(part) if part.isdigit() else part for part in mistake.key.split("."))
            return replace(mistake, path=mistake.path or document.origin(keys)) if mistake.key else mistake

        raise ConfigError.from_mistakes(map(locate, error.mistakes)) from error


def read_document(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str] = (),
    *,
    model: type[Config] = Config,
    bases: bool = True,
) -> ConfigDocument:
    """Return the values of a file, its bases and overrides, with the place of each; arguments are those of `load`."""
    shorthands: dict[Keys, str] = {
        keys: section.SHORT_FOR
        for keys, section in iterate_sections(model)
        if issubclass(section, Config) and section.SHORT_FOR
    }
    if isinstance(path, str | Path):
        document = ConfigDocument.read_merged(Path(path), shorthands) if bases else ConfigDocument.read(Path(path))
    else:
        source = "the defaults" if path is None else "the given configuration"
        document = ConfigDocument(source, copy.deepcopy(dict(path or {})), {})
    document.shorthands = shorthands
    for override in overrides:
        document.override(override)
    document.expand_shorthands()
    return document


def parse(model: type[M], options: Mapping[str, Any], key: str = "options") -> M:
    """Return the options under `key`, whose model depends on other keys; raises `ValidatorError`, for validators."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        mistakes = []
        for item in error.errors(include_url=False):
            keys = tuple(item["loc"])
            place = dotted((key, *keys))
            if item["type"] == "extra_forbidden":
                mistakes.append(replace(describe_unknown_key(keys, model), key=place))
            else:
                mistakes.append(Mistake(place, item["msg"]))
        raise ValidatorError(mistakes) from error


def dump(config: Config) -> str:
    """Return YAML of the whole configuration, defaults included; `load` gives back an equal model."""
    return dump_yaml(config.model_dump(mode="json"))


def read_yaml(path: Path) -> Any:
    """Return the mapping in a YAML file as plain values; `ConfigError` if there is none, or it is too large."""
    return ConfigDocument.read(path).data


def add_import_folders(path: str | Path) -> None:
    """Put the folders of a configuration file and of its bases on the import path, that of the file first."""
    for file in reversed(ConfigDocument.read_merged(Path(path)).files):
        add_import_folder(file)


def add_import_folder(path: str | Path) -> None:
    """Put the folder of the file `path` on the import path, so that its YAML can name `module:attribute` beside it.

    It comes before installed packages, but after the standard library: a file `numbers.py` would otherwise replace a module
    that libraries import.
    """
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(find_end_of_library(sys.path), folder)


def environment(*names: str) -> dict[str, str]:
    """Return the given environment variables that are set, for a program that is to have no others."""
    return {name: os.environ[name] for name in names if name in os.environ}


def environment_with(**variables: str) -> dict[str, str]:
    """Return all environment variables and these, for a program that the user starts."""
    return {**os.environ, **variables}


def set_environment(**variables: str) -> None:
    """Set environment variables, each unless the user has, for libraries that take a setting in no other way."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def add_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables, whatever they were."""
    os.environ.update(variables)


def visible_gpus() -> list[str] | None:
    """Return the names in CUDA_VISIBLE_DEVICES; None if it is not set, and all GPUs are visible."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else [part.strip() for part in named.split(",") if part.strip()]


def set_visible_gpus(gpus: Sequence[str]) -> None:
    """Make these GPUs alone visible to this process, by the names of `visible_gpus`; call it before CUDA starts."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def read_secret(variable: str) -> str:
    """Return the secret in an environment variable; `ConfigError` if it is not set."""
    value = os.environ.get(variable, "")
    if not value:
        raise ConfigError(f"the environment variable {variable!r} is not set", value=variable)
    return value
