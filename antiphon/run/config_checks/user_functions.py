"""Checks of a user's own loss, advantage, stages and engines, when a run starts.

Reading a configuration imports no code that it names, so what these functions declare (`antiphon.algorithms.declarations`), and
which options they take, is checked here, before anything is started. `config_checks/algorithms.py` has the checks.
"""

from typing import TYPE_CHECKING

from antiphon.algorithms.declarations import declaration_of
from antiphon.algorithms.registry import resolve_advantage, resolve_loss, resolve_streams
from antiphon.core.errors import ConfigError, ValidatorError
from antiphon.core.registry import check_import_path
from antiphon.core.types import STREAMS
from antiphon.learning.stages import resolve_stages
from antiphon.run.config_checks.algorithms import (
    Declarations,
    check_advantage,
    check_critics,
    check_streams,
    check_teachers,
)
from antiphon.run.config_checks.common import iterate_engines

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig


def add_declared_needs(config: "RunConfig") -> "RunConfig":
    """Return the configuration with the streams of Antiphon that the user's functions need in `algorithm.streams`.

    Raises:
        ConfigError: A function cannot be imported, does not take its options, or needs a stream that nothing computes.
    """
    algorithm = config.algorithm
    declared = Declarations(
        advantage=declaration_of(resolve_advantage(algorithm)),
        loss=declaration_of(resolve_loss(algorithm)),
        requested=tuple(resolve_streams(algorithm)),
        stages=tuple(map(declaration_of, resolve_stages(config.learner))),
    )
    known = algorithm.required_streams
    needs = [spec.name for spec in declared.needs if spec.name in STREAMS and spec not in known]
    if needs:
        streams = tuple(dict.fromkeys((*algorithm.streams, *needs)))
        config = config.model_copy(update={"algorithm": algorithm.model_copy(update={"streams": streams})})
    problems = [
        *check_advantage(config, declared.advantage),
        *(check_critics(config, needs_known=True) if config.critic is not None else ()),
        *check_teachers(config, needs_known=True),
        *check_streams(config, declared),
    ]
    if problems:
        raise ConfigError.from_mistakes(ValidatorError(problems).mistakes)
    return config


def check_engine_paths(config: "RunConfig") -> None:
    """Raise `ConfigError` if an engine's import path leads nowhere; imports nothing, because engines import heavy packages.

    Paths that another interpreter or another node imports are not checked.
    """
    if config.cluster.kind != "local":
        return
    for at, engine in iterate_engines(config):
        if ":" in engine.kind and not engine.python:
            check_import_path(engine.kind, "engine", f"{at}.kind")
