"""The configuration of a run that somebody else may have made.

Verbs that only read a run take its configuration from here. Reading it imports, runs and opens nothing of what it names. What a
verb needs of these names is resolved only for those who say so: `--code DIR` vouches for the modules in a folder, and for the
data and models that the configuration names; `--trust` for all of it. The run's own folder is never on the import path.
"""

import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from antiphon.core.config import add_import_folder, load
from antiphon.core.errors import ConfigError, RecordError
from antiphon.engines.config import SERVER_KINDS
from antiphon.record import reading
from antiphon.run.config import RunConfig

# What each verb resolves of a configuration: keys without the numbers of list items, and all that stands below them.
REPLAY = ("tasks.prompts", "rollout.filter", "algorithm", "learner.stages")
MODELS = ("model.path", "learner", "critic", "teachers", "cluster", "weights")
_GRADED_BY = ("reward", "reward_options", "group_reward", "group_reward_options", "judge", "grading")
_GRADING = (*(f"tasks.{key}" for key in _GRADED_BY), "grading", "cluster")
_PLAYED_IN = ("test", "environment", "environment_options", "environment_pool", "agent")
REGRADE = ("tasks.prompts", "model.path", *_GRADING)
ENGINES = ("engine", "weights")
EVALUATION = (*(f"tasks.{key}" for key in _PLAYED_IN), "rollout.tool_format", *_GRADING, *ENGINES)

_NAME = re.compile(r"[A-Za-z_][\w.]*:\S+")
_OPTIONS = re.compile(r".*options\..+")
_FILES = ("model.path", "tasks.judge.path", "critic.path", "teachers.path")
_SELF_CONTAINED = ("reasoning_gym", "tools")  # sources of prompts that read no file
# Environments that import, run or ask what they are told to.
_OPENING = ("gem", "gymnasium", "mini_swe", "openenv", "textarena", "tools")
_SERVICES = ("address", "key", "url", "urls")  # of options: a server, and the environment variable that it is sent
_MOST = {"workers": 64, "max_workers": 64, "replicas": 64, "threads": 256, "deadline": 3600}
_MOST_OPTION = 10_000_000
_CODE, _FILE, _PROGRAM = "names code", "names what lies outside the run", "decides what this machine runs or asks"
_HOW = {
    _PROGRAM: "--trust resolves it",
    _CODE: "--code DIR resolves names of modules in DIR, --trust all",
    _FILE: "--code DIR, the folder of this run's modules, or --trust resolves it",
}


def load_recorded(run: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration that a run was made with, without a look at what it names. `RecordError` if it has none."""
    path = reading.resolve_file(run, "config.yaml")
    try:
        with reading.convert_read_errors(path):
            return load(path, overrides, model=RunConfig)
    except ConfigError as error:
        first, *others = str(error).splitlines()
        raise RecordError(f"{first}{f' (and {len(others)} more mistakes)' if others else ''}") from error


def has_model(run: Path) -> bool:
    """Return True if a run keeps the model that it began with. `RecordError` if that is not of regular files of its own."""
    built = reading.resolve_path(run, "model")
    if not built.is_dir():
        return False
    reading.check_model_files(built)
    return True


def require_trust(
    run: Path,
    config: RunConfig,
    needed: Collection[str],
    *,
    code: Path | None = None,
    trust: bool = False,
    given: Collection[str] = (),
) -> None:
    """Raise `RecordError` if a verb needs something of a run's configuration that nobody vouches for.

    Args:
        run: Directory of the run.
        config: Its configuration, perhaps changed by the user.
        needed: Keys that the verb resolves, and all below them.
        code: Folder of modules that may be imported; it is put on the import path.
        trust: Resolve everything.
        given: Keys that the user gave, which are not the run's.
    """
    if code is not None:
        add_import_folder(code / "config.yaml")
    if trust:
        return
    refused: dict[str, list[str]] = {}
    for key, value, need in _foreign(config, run, needed):
        vouched = code is not None and (need == _FILE or (need == _CODE and _is_module_of(code, value)))
        if not vouched and not key.startswith(tuple(given)):
            refused.setdefault(need, []).append(f"{key} {value!r:.200}")
    for need, how in _HOW.items():
        if need in refused:
            first, *others = refused[need]
            more = f" (and {len(others)} more)" if others else ""
            raise RecordError(
                f"{run / 'config.yaml'}: {first}{more} {need}: it is not resolved for a run that is read. {how}"
            )


def _is_module_of(folder: Path, name: str) -> bool:
    """Return True if the module of a name is a file in a folder, and would be imported from there."""
    top = name.partition(":")[0].partition(".")[0]
    loaded = getattr(sys.modules.get(top), "__file__", None)
    if top in sys.stdlib_module_names or (loaded and not Path(loaded).resolve().is_relative_to(folder.resolve())):
        return False
    return (folder / f"{top}.py").is_file() or (folder / top).is_dir()


def _foreign(config: RunConfig, run: Path, needed: Collection[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield what a configuration names outside of itself below the keys that are needed: key, value, what it needs."""
    built = has_model(run)
    for key, value in _leaves(config.model_dump(mode="json")):
        if built and key == "model.path":  # the run has what it wrote
            continue
        plain = re.sub(r"\.\d+(?=\.|$)", "", key)
        if any(plain == each or plain.startswith(f"{each}.") for each in needed):
            need = _need(plain, value, run)
            if need:
                yield key, value, need


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    inner = dict(enumerate(tree)) if isinstance(tree, list) else tree
    if not isinstance(inner, dict):
        yield key, tree
        return
    for name, value in inner.items():
        yield from _leaves(value, f"{key}.{name}" if key else str(name))


def _need(key: str, value: Any, run: Path) -> str:
    """Return what a value needs before it is used; nothing if it is harmless."""
    last = key.rpartition(".")[2]
    if value is None or value == "":
        return ""
    if _runs_something(key, last, value):
        return _PROGRAM
    if isinstance(value, int | float):
        most = _MOST_OPTION if _OPTIONS.fullmatch(key) else _MOST.get(last, value)
        return _PROGRAM if value > most else ""
    if not isinstance(value, str):
        return ""
    if _NAME.fullmatch(value) and last != "device":
        return _PROGRAM if "://" in value else _CODE
    named = key in _FILES or (last == "source" and value not in _SELF_CONTAINED)
    path = named or (_OPTIONS.fullmatch(key) and (last == "path" or os.sep in value))
    if not path or (key in _FILES and Path(value).resolve().is_relative_to(run.resolve())):
        return ""
    return _FILE


def _runs_something(key: str, last: str, value: Any) -> bool:
    """Return True if a value names a program, a server, or how well programs are kept apart."""
    if key.startswith("engine"):
        return last == "python" or (last == "kind" and value in SERVER_KINDS) or bool(_OPTIONS.fullmatch(key))
    if _OPTIONS.fullmatch(key) and last in _SERVICES:
        return True
    return (
        (key == "cluster.kind" and value != "local")
        or key in ("cluster.address", "weights.directory", "tasks.agent.command")
        or (key == "weights.host" and value != "127.0.0.1")
        or (key == "tasks.environment" and value in _OPENING)
        or (last == "source" and value == "huggingface")
        or "sandbox" in key.split(".")
    )
