"""Load the configuration that a command is given, and show what follows from it."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from antiphon.cli.errors import forbid_imports_from
from antiphon.cli.tables import print_derived
from antiphon.core.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

    from antiphon.core.config import Config
    from antiphon.run.chat_api import ChatAPI
    from antiphon.run.config import RunConfig

    C = TypeVar("C", bound=Config)


def limit_threads() -> None:
    """Keep numpy and torch of this process to one thread; call it before either is imported.

    Workers set their own number of threads, and the controller computes little.
    """
    from antiphon.core.config import set_environment

    set_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")


def load_config(path: str, overrides: list[str] | None, model: "type[C]") -> "C":
    """Load a configuration file whose folder may be imported from."""
    from antiphon.core.config import add_import_folders, load

    config = load(path, overrides or (), model=model)
    add_import_folders(path)
    return config


def refuse_both(overwrite: bool, resume: bool) -> None:
    """Raise `ConfigError` if a run is to be replaced and continued."""
    if overwrite and resume:
        raise ConfigError("give --overwrite or --resume, not both")


@contextmanager
def locate_errors(path: str, overrides: list[str] | None) -> "Iterator[None]":
    """Name file and line in configuration errors of a run's start, as the loader does in those that it finds itself."""
    from antiphon.core.config import locate_mistakes
    from antiphon.run.config import RunConfig

    with locate_mistakes(path, overrides or (), model=RunConfig):
        yield


def load_run(path: str, overrides: list[str] | None) -> "RunConfig":
    """Load the configuration of a run that is to be started."""
    limit_threads()
    from antiphon.run.config import RunConfig

    return load_config(path, overrides, RunConfig)


def load_recorded(run: Path) -> "tuple[RunConfig, ModuleType]":
    """Load the configuration of a run that is only read.

    Returns:
        The configuration, and the module that says which of its names a command may resolve.
    """
    limit_threads()
    from antiphon.inspect import recorded_config

    return recorded_config.load_recorded(run), recorded_config


def load_for_evaluation(path: Path, overrides: list[str], code: Path | None, trust: bool) -> "RunConfig":
    """Load the configuration of an evaluation; names in one that a run recorded need `code` or `trust`."""
    recorded = _is_recorded(path)
    if recorded:
        forbid_imports_from(path.parent)
    limit_threads()
    if code is not None:
        from antiphon.core.config import add_import_folder

        add_import_folder(code / "config.yaml")
    if not recorded:
        return load_run(str(path), overrides)
    from antiphon.inspect import recorded_config

    run = recorded_config.load_recorded(path.parent, overrides)
    given = [override.partition("=")[0].strip() for override in overrides]
    recorded_config.require_trust(path.parent, run, recorded_config.EVALUATION, code=code, trust=trust, given=given)
    return run


def load_for_branch(run: Path, step: int, overrides: list[str], code: Path | None, trust: bool) -> "RunConfig":
    """Load the configuration of a run that branches off a recorded one; names in that one need `code` or `trust`."""
    limit_threads()
    from antiphon.inspect import recorded_config
    from antiphon.run.branch import default_overrides

    config = recorded_config.load_recorded(run, [*default_overrides(run, step), *overrides])
    given = [override.partition("=")[0].strip() for override in overrides]
    recorded_config.require_trust(run, config, tuple(type(config).model_fields), code=code, trust=trust, given=given)
    return config


def _is_recorded(path: Path) -> bool:
    """Return True if a configuration file is the one that a run keeps of itself."""
    beside = path.parent
    return path.name == "config.yaml" and ((beside / "ledger.db").exists() or (beside / "checkpoints").exists())


def require_models(paths: Iterable[str]) -> None:
    """Raise an error unless each path names a model that can be loaded."""
    from antiphon.record.checkpoint import check_model
    from antiphon.run.model_files import check_model_path, check_weights

    for path in paths:
        check_model_path(path)
        check_model(Path(path))
        check_weights(Path(path))


def make_api(url: str, key: str, settings: str) -> "ChatAPI | None":
    """Return the API that the options name; None without one."""
    from antiphon.run.chat_api import ChatAPI

    try:
        fields = json.loads(settings)
    except ValueError as error:
        raise ConfigError(f"--api-settings: no JSON: {error}", value=settings) from error
    if not isinstance(fields, dict):
        raise ConfigError(
            f'--api-settings: {settings} is no JSON object, such as {{"max_tokens": 512}}', value=settings
        )
    if url:
        return ChatAPI(url=url, key=key, settings=fields)
    if key or fields:
        raise ConfigError("--api-key and --api-settings are of --api: give its URL")
    return None


def print_run(run: "RunConfig", path: str, overrides: list[str] | None, *, trains: bool = False) -> None:
    """Print the resolved configuration of a run as YAML, with derived sizes as comments.

    If the run `trains` by reinforcement learning, its servers are checked too.
    """
    from antiphon.run.config_checks.servers import check_servers
    from antiphon.run.config_checks.user_functions import check_import_paths
    from antiphon.run.launch.model_checks import check_meshes
    from antiphon.run.memory import memory_estimate
    from antiphon.run.model_files import count_parameters

    check_import_paths(run)
    if trains:
        check_servers(run, dry_run=True)
    check_meshes(run, Path(run.model.path))
    print_config(run, path, overrides)
    print_derived(run.derived())
    parameters = count_parameters(run.model.path)
    if parameters is None and (path_of_shape := Path(run.model.path) / "config.json").is_file():
        from antiphon.simulate.model_shape import Architecture

        parameters = Architecture.read(path_of_shape.parent).parameters
    if parameters is not None:
        print(f"# Memory for {parameters:,} parameters, without activations and KV caches:")
        for name, size in memory_estimate(parameters, run).items():
            print(f"#   {name:<38}{size / 2**20:>10,.0f} MiB")


def print_config(config: "Config", path: str, overrides: list[str] | None) -> None:
    """Print a configuration as YAML that is itself a recipe, with what gave each value as a comment."""
    from antiphon.core.config import dump, read_document
    from antiphon.core.yaml_text import annotate_yaml
    from antiphon.run.config import RunConfig

    document = read_document(path, overrides or (), model=type(config))
    derived: dict[tuple[str | int, ...], str] = {}
    if isinstance(config, RunConfig):
        config, derived = _derive(config, document.has(("algorithm", "recipe")))

    def describe(keys: tuple[str | int, ...]) -> str:
        by = [derived[keys[:length]] for length in range(len(keys), 0, -1) if keys[:length] in derived]
        return document.source_of(keys) or next(iter(by), "default")

    print(annotate_yaml(dump(config), describe), end="")


def _derive(run: "RunConfig", named: bool) -> "tuple[RunConfig, dict[tuple[str | int, ...], str]]":
    """Return a run with the values that this machine decides, and what gives the values that are no plain defaults.

    Args:
        run: The configuration.
        named: The user named an algorithm's recipe.
    """
    from antiphon.algorithms.recipes import RECIPES
    from antiphon.run.config_changes import flatten
    from antiphon.run.pack_size import LARGEST, choose_pack_size

    recipe = run.algorithm.recipe
    parts = flatten(RECIPES[recipe]) if named else ()
    found: dict[tuple[str | int, ...], str] = {("algorithm", *key.split(".")): f"recipe {recipe}" for key, _ in parts}
    chosen = "default, or less by this machine's memory, when the model is there"
    if (Path(run.model.path) / "config.json").is_file():
        resolved = choose_pack_size(run, Path(run.model.path))
        chosen = "default" if resolved is run else "this machine"
        run = resolved
    return run, found | {("learner", key): chosen for key in LARGEST}
