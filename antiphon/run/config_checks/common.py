"""Helpers of all checks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from antiphon.core.errors import ConfigError, Mistake
from antiphon.core.registry import Registry
from antiphon.engines.config import EngineKind

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig

Problem = Mistake | tuple[str, str]  # a tuple: dotted key, message


def check_registered(registry: Registry, name: str, path: str) -> Iterator[Problem]:
    """Yield a problem unless `name` is registered, or an import path."""
    try:
        registry.check(name)
    except ConfigError as error:
        yield Mistake(path, str(error), name, error.valid, suggestions=error.suggestions)


def iterate_engines(config: "RunConfig") -> Iterator[tuple[str, EngineKind]]:
    """Yield each kind of engine in the pool with its dotted key."""
    yield "engine", config.engine
    for number, other in enumerate(config.engine.also):
        yield f"engine.also.{number}", other
