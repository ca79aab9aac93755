"""Configurations from Python: a file or mapping, changed by keyword arguments, with objects in the place of names."""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from antiphon.core.config import Config, add_import_folders, dump, load, read_document
from antiphon.core.config_document import dotted
from antiphon.core.errors import ConfigError
from antiphon.core.objects import attach_here, is_attached, is_attached_name, missing_object, name_object
from antiphon.core.yaml_text import Keys, parse_yaml
from antiphon.run.config import RunConfig
from antiphon.run.config_changes import flatten
from antiphon.run.model_object import ModelObject
from antiphon.tasks.sources import Rows

C = TypeVar("C", bound=Config)
PROMPTS = ("prompts", "validation", "test")  # keys of sources of prompts
Source = str | Path | Mapping[str, Any] | RunConfig


def load_config(
    config: Source | None = None,
    overrides: Sequence[str] = (),
    *,
    reward: Any = None,
    prompts: Any = None,
    environment: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    **changes: Any,
) -> RunConfig:
    """Return the configuration of a run, from a file or from Python values.

    Wherever a name of a function or class may stand, the object itself may stand. `docs/python.md` has examples.

    Args:
        config: A YAML file, whose folder is put on the import path; a mapping with the same keys; or another configuration.
        overrides: Changes as on the command line, such as `rollout.group_size=4`.
        reward: Reward of the only task: a function or a class, or a list of these in which each may be `(reward, weight)`.
        prompts: Prompts of the only task: a list of mappings, a data set, a mapping from split to one, or a function that
            yields mappings. If there is a split `test`, it is evaluated on.
        environment: Environment of the only task, a class or a function that makes one.
        model: Directory or Hugging Face id of the model, or a model of transformers, which is copied.
        tokenizer: Tokenizer of such a model.
        changes: Values of other keys. A mapping changes the keys that it has and leaves the others of the section.

    Raises:
        ConfigError: Anything is wrong with it, or an object cannot be sent to worker processes.
    """
    given = {"reward": reward, "prompts": prompts, "environment": environment}
    task = {key: value for key, value in given.items() if value is not None}
    if isinstance(config, str | Path):
        add_import_folders(config)
    data = _read(config, has_task=bool(task))
    arguments = [_override(key, value) for key, value in _changes(task, model, tokenizer, data)]
    overrides = [
        *arguments,
        *overrides,
    ]  # those can change what an argument stands for, such as the limit of its prompts
    return load_changed(config if isinstance(config, str | Path) else data, overrides, changes, model=RunConfig)


def load_changed(
    config: Source | Config | None, overrides: Sequence[str], changes: Mapping[str, Any], *, model: type[C]
) -> C:
    """Return the configuration of any command, from a file or from Python values; arguments are those of `load_config`."""
    for key, value in changes.items():
        named = _name_objects(value, tuple(key.split(".")))
        overrides = [*overrides, *(_override(path, leaf) for path, leaf in flatten(named, key))]
    return load(config if isinstance(config, str | Path) else _read(config, has_task=False), overrides, model=model)


def require_attached_objects(config: RunConfig, *, has_model: bool) -> None:
    """Raise one `ConfigError` if the configuration names attached objects that this process does not have.

    Args:
        config: The configuration.
        has_model: The run has its model already, and does not need the object that it was made from.
    """
    missing = [
        missing_object(value, dotted(key))
        for key, value in _leaves(config.model_dump(mode="json"), ())
        if isinstance(value, str) and is_attached_name(value) and not is_attached(value)
        if not (has_model and key == ("model", "path"))
    ]
    if missing:
        raise ConfigError.from_mistakes(mistake for error in missing for mistake in error.mistakes)


def _read(config: Any, *, has_task: bool) -> dict[str, Any]:
    """Return a configuration as plain values with names; a task is added if there is none and it is asked for."""
    if isinstance(config, Config):
        data, _ = parse_yaml(dump(config), type(config).__name__)
    elif isinstance(config, str | Path):
        data = read_document(config).data
    else:
        if not isinstance(config, Mapping | None):
            message = f"a configuration is the path of a YAML file or a mapping, not {type(config).__name__}"
            raise ConfigError(message, value=config)
        data = _name_objects(dict(config or {}), ())
    if has_task and not data.get("tasks") and not isinstance(config, str | Path):
        data["tasks"] = [{"name": "task"}]
    return data


def _override(key: str, value: Any) -> str:
    try:
        return f"{key}={json.dumps(value)}"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cannot be a tree of plain values: {error}", key=key) from error


def _changes(task: Mapping[str, Any], model: Any, tokenizer: Any, data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys that the arguments for the only task and for the model stand for, with their values."""
    if isinstance(model, Mapping):
        yield from flatten(_name_objects(model, ("model",)), "model")
    elif isinstance(model, str | Path):
        yield "model.path", str(model)
    elif model is not None:
        yield "model.path", _attach_model(model, tokenizer)
    elif tokenizer is not None:
        raise ConfigError("is that of a model object; give it as model=", key="tokenizer")
    tasks = data.get("tasks")
    if task and not (isinstance(tasks, Sequence) and len(tasks) == 1):
        found = len(tasks) if isinstance(tasks, Sequence) else 0
        message = f"belongs to the only task, and there are {found}: put it into tasks"
        raise ConfigError(message, key=next(iter(task)))
    for key, value in task.items():
        at = f"tasks.0.{key}"
        if key == "prompts":
            yield from _prompt_changes(value)
        elif key == "reward":
            named, options = _name_reward(value, at)
            yield at, named
            yield f"{at}_options", options
        else:
            yield at, _name_objects(value, (at,))
            yield f"{at}_options", {}


def _prompt_changes(value: Any) -> Iterator[tuple[str, Any]]:
    yield "tasks.0.prompts", _name_prompts(value, "tasks.0.prompts")
    if isinstance(value, Mapping) and "test" in value and _is_rows(value):
        yield "tasks.0.test", {**_name_prompts(value, "tasks.0.test"), "split": "test"}


def _name_reward(value: Any, key: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a reward and its options; several rewards are parts of `composed`."""
    if not isinstance(value, list):
        named: str = _name_objects(value, (key,))
        return named, {}
    parts: dict[str, Any] = {}
    for number, each in enumerate(value):
        reward, weight = each if isinstance(each, tuple) and len(each) == 2 else (each, 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            message = "a reward and its weight are (reward, number); rewards without weights are a list of rewards"
            raise ConfigError(message, key=dotted((key, number)), value=weight)
        named = _name_objects(reward, (key, number))
        called = named.partition("@")[0].rpartition(":")[2].rpartition(".")[2].strip("<>")
        free = next(name for copy in count(1) if (name := f"{called}_{copy}" if copy > 1 else called) not in parts)
        parts[free] = {"reward": named, "weight": float(weight)}
    return "composed", {"parts": parts}


def _name_objects(value: Any, keys: Keys) -> Any:
    """Return a tree of plain values in which objects are replaced by their names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if keys and keys[-1] in PROMPTS and (_is_rows(value) or callable(value)):
        return _name_prompts(value, dotted(keys))
    if isinstance(value, Mapping):
        return {str(key): _name_objects(item, (*keys, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_name_objects(item, (*keys, number)) for number, item in enumerate(value)]
    return name_object(value, dotted(keys))


def _name_prompts(value: Any, key: str) -> dict[str, Any]:
    """Return the section of a source of prompts: rows in memory, or a function that yields rows."""
    if _is_rows(value):
        rows = Rows(value)
        return {"source": attach_here(rows, f"{type(value).__module__}:{type(value).__qualname__}", rows.digest())}
    if isinstance(value, Mapping):
        section: dict[str, Any] = _name_objects(value, (key,))
        return section
    if inspect.isroutine(value) or callable(value):
        return {"source": name_object(value, key)}
    message = (
        f"is {type(value).__name__}; prompts are a list of mappings, a data set, or a function that yields mappings"
    )
    raise ConfigError(message, key=key)


def _is_rows(value: Any) -> bool:
    """Return True for a list of mappings, a data set, or a mapping from split to one."""
    if isinstance(value, Mapping):
        return bool(value) and all(_is_rows(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(isinstance(row, Mapping) for row in value)
    return hasattr(value, "column_names") and hasattr(value, "__iter__")  # of the library datasets


def _attach_model(model: Any, tokenizer: Any) -> str:
    if not hasattr(model, "save_pretrained"):
        message = f"is {type(model).__name__}; give a directory, a Hugging Face id or a model of transformers"
        raise ConfigError(message, key="model", value=type(model).__name__)
    if not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError("is missing: a model object needs its tokenizer", key="tokenizer")
    found = ModelObject(model, tokenizer)
    return attach_here(found, f"{type(model).__module__}:{type(model).__qualname__}", found.digest())


def _leaves(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """Yield path and value of each leaf of nested mappings and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield keys, value
        return
    for key, item in items:
        yield from _leaves(item, (*keys, key))
