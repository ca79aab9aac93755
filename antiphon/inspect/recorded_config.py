"""The configuration of a run that somebody else may have made.

Commands that only read a run load its configuration here, which imports, runs and opens nothing that it names. The names that a
command needs are resolved only on demand: `--code DIR` permits the modules in a folder, and the data and models that the
configuration names; `--trust` permits everything. The run's own folder is never on the import path.
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
from antiphon.record import safe_files
from antiphon.run.config import RunConfig

# What each command resolves of a configuration: keys without list indices, and everything below them.
REPLAY = ("tasks.prompts", "rollout.filter", "algorithm", "learner.stages", "learner.stage_options")
MODELS = ("model.path", "learner", "critic", "teachers", "cluster", "weights")
_GRADED_BY = ("reward", "reward_options", "group_reward", "group_reward_options", "judge", "grading")
_GRADING = (*(f"tasks.{key}" for key in _GRADED_BY), "grading", "cluster")
_PLAYED_IN = ("test", "environment", "environment_options", "environment_pool", "agent")
REGRADE = ("tasks.prompts", "model.path", *_GRADING)
ENGINES = ("engine", "weights")
EVALUATION = (*(f"tasks.{key}" for key in _PLAYED_IN), "rollout.tool_format", *_GRADING, *ENGINES)

_NAME = re.compile(r"[A-Za-z_][\w.]*:\S+")
_OPTIONS = re.compile(r".*options\..+")
_FILE_KEYS = ("model.path", "tasks.judge.path", "critic.path", "teachers.path")
_SELF_CONTAINED_SOURCES = ("reasoning_gym", "tools")  # they read no file
# Environments that import modules, start programs or connect to servers that their options name.
_OPEN_ENVIRONMENTS = ("gem", "gymnasium", "mini_swe", "openenv", "openreward", "task_images", "textarena", "tools")
_SERVER_OPTIONS = (
    "address",
    "key",
    "url",
    "urls",
)  # options that name a server, or an environment variable that is sent to it
_MAX = {"workers": 64, "max_workers": 64, "replicas": 64, "threads": 256, "deadline": 3600}
_MAX_OPTION = 10_000_000
_CODE, _FILE, _PROGRAM = "names code", "names files outside of the run", "decides what this machine runs or connects to"
_REMEDIES = {
    _PROGRAM: "--trust resolves it",
    _CODE: "--code DIR resolves the modules in DIR, --trust everything",
    _FILE: "--code DIR, the folder of this run's modules, or --trust resolves it",
}


def load_recorded(run: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration that a run recorded, without resolving what it names; raise `RecordError` if it has none."""
    path = safe_files.resolve_file(run, "config.yaml")
    try:
        with safe_files.convert_read_errors(path):
            return load(path, overrides, model=RunConfig, bases=False)
    except ConfigError as error:
        first, *others = str(error).splitlines()
        more = f" (and {len(others)} more errors)" if others else ""
        raise RecordError(f"{first}{more}", path=path) from error


def has_model(run: Path) -> bool:
    """Return True if a run holds the model that it began with; raise `RecordError` if that has other than regular files."""
    model = safe_files.resolve_path(run, "model")
    if not model.is_dir():
        return False
    safe_files.check_model_files(model)
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
    """Raise `RecordError` if a command needs something of a run's configuration that the user has not permitted.

    Args:
        run: Directory of the run.
        config: Its configuration, perhaps changed by the user.
        needed: Keys that the command resolves, with everything below them.
        code: Folder of modules that may be imported; it is added to the import path.
        trust: Resolve everything.
        given: Keys whose values come from the user and not from the run.
    """
    if code is not None:
        add_import_folder(code / "config.yaml")
    if trust:
        return
    refused: dict[str, list[str]] = {}
    for key, value, need in _iterate_references(config, run, needed):
        is_permitted = code is not None and (need == _FILE or (need == _CODE and _is_module_of(code, value)))
        if not is_permitted and not key.startswith(tuple(given)):
            refused.setdefault(need, []).append(f"{key} {value!r:.200}")
    for need, remedy in _REMEDIES.items():
        if need in refused:
            first, *others = refused[need]
            more = f" (and {len(others)} more)" if others else ""
            path = run / "config.yaml"
            message = f"{path}: {first}{more} {need}: it is not resolved, since a run may come from elsewhere. {remedy}"
            raise RecordError(message, path=path)


def _is_module_of(folder: Path, name: str) -> bool:
    """Return True if a name's module is in a folder and would be imported from there."""
    top = name.partition(":")[0].partition(".")[0]
    loaded = getattr(sys.modules.get(top), "__file__", None)
    if top in sys.stdlib_module_names or (loaded and not Path(loaded).resolve().is_relative_to(folder.resolve())):
        return False
    return (folder / f"{top}.py").is_file() or (folder / top).is_dir()


def _iterate_references(config: RunConfig, run: Path, needed: Collection[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield what a configuration refers to below the needed keys: key, value, and the kind of permission it needs."""
    has_own_model = has_model(run)
    for key, value in _iterate_leaves(config.model_dump(mode="json")):
        if has_own_model and key == "model.path":  # that model is used
            continue
        plain = re.sub(r"\.\d+(?=\.|$)", "", key)
        if any(plain == each or plain.startswith(f"{each}.") for each in needed):
            need = _find_need(plain, value, run)
            if need:
                yield key, value, need


def _iterate_leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    inner = dict(enumerate(tree)) if isinstance(tree, list) else tree
    if not isinstance(inner, dict):
        yield key, tree
        return
    for name, value in inner.items():
        yield from _iterate_leaves(value, f"{key}.{name}" if key else str(name))


def _find_need(key: str, value: Any, run: Path) -> str:
    """Return the kind of permission that a value needs; an empty string if it is harmless."""
    last = key.rpartition(".")[2]
    if value is None or value == "":
        return ""
    if _controls_execution(key, last, value):
        return _PROGRAM
    if isinstance(value, int | float):
        most = _MAX_OPTION if _OPTIONS.fullmatch(key) else _MAX.get(last, value)
        return _PROGRAM if value > most else ""
    if not isinstance(value, str):
        return ""
    if _NAME.fullmatch(value) and last != "device":
        return _PROGRAM if "://" in value else _CODE
    named = key in _FILE_KEYS or (last == "source" and value not in _SELF_CONTAINED_SOURCES)
    path = named or (_OPTIONS.fullmatch(key) and (last == "path" or os.sep in value))
    if not path or (key in _FILE_KEYS and Path(value).resolve().is_relative_to(run.resolve())):
        return ""
    return _FILE


def _controls_execution(key: str, last: str, value: Any) -> bool:
    """Return True if a value names a program, a server, or the isolation of programs."""
    if key.startswith("engine"):
        return last == "python" or (last == "kind" and value in SERVER_KINDS) or bool(_OPTIONS.fullmatch(key))
    if _OPTIONS.fullmatch(key) and last in _SERVER_OPTIONS:
        return True
    return (
        (key == "cluster.kind" and value != "local")
        or key in ("cluster.address", "weights.directory", "tasks.agent.command")
        or (key == "weights.host" and value != "127.0.0.1")
        or (key == "tasks.environment" and value in _OPEN_ENVIRONMENTS)
        or (last == "source" and value == "huggingface")
        or "sandbox" in key.split(".")
    )
