"""Load the configuration that a command is given, and show what follows from it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from antiphon.cli.errors import forbid_imports_from
from antiphon.cli.tables import print_derived

if TYPE_CHECKING:
    from types import ModuleType

    from antiphon.core.config import Config
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
    from antiphon.core.config import add_import_folder, load

    config = load(path, overrides or (), model=model)
    add_import_folder(path)
    return config


@contextmanager
def name_places(path: str, overrides: list[str] | None) -> "Iterator[None]":
    """Name file and line in configuration errors of a run's start, as the loader does in those that it finds itself."""
    from antiphon.core.config import locate_mistakes

    with locate_mistakes(path, overrides or ()):
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


def print_run(run: "RunConfig") -> None:
    """Print the resolved configuration as YAML with derived sizes as comments, so that the output is itself a recipe."""
    from antiphon.core.config import dump
    from antiphon.run.launch.model_checks import check_meshes
    from antiphon.run.memory import memory_estimate
    from antiphon.run.model_files import count_parameters

    check_meshes(run, Path(run.model.path))
    print(dump(run), end="")
    print_derived(run.derived())
    parameters = count_parameters(run.model.path)
    if parameters is None and (path := Path(run.model.path) / "config.json").is_file():
        from antiphon.simulate.model_shape import Architecture

        parameters = Architecture.read(path.parent).parameters
    if parameters is not None:
        print(f"# Memory for {parameters:,} parameters, without activations and KV caches:")
        for name, size in memory_estimate(parameters, run).items():
            print(f"#   {name:<38}{size / 2**20:>10,.0f} MiB")
