"""Checks of a user's own functions and classes, when a run starts.

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
from antiphon.run.config_checks.names import iterate_names

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


def check_import_paths(config: "RunConfig", under: str = "") -> None:
    """Raise `ConfigError` if an import path leads nowhere; imports nothing, because what it leads to may be heavy.

    Paths that another interpreter or another node imports are not checked.

    Args:
        config: The run's configuration.
        under: Check only the keys that begin with this.
    """
    if config.cluster.kind != "local":
        return
    foreign = {f"{at}.kind" for at, engine in iterate_engines(config) if engine.python}
    named = [(registry.kind, name, key) for registry, name, key in iterate_names(config) if key not in foreign]
    named += [
        ("agent", getattr(task.agent, kind), f"tasks.{i}.agent.{kind}")
        for i, task in enumerate(config.tasks)
        for kind in ("function", "atropos")
        if task.agent
    ]
    named += [("group sampler", config.rollout.sampler or "", "rollout.sampler")]
    named += [("role", role.factory, f"roles.{name}.factory") for name, role in config.roles.items()]
    for kind, name, key in named:
        if ":" in name and key.startswith(under):
            check_import_path(name, kind, key)
