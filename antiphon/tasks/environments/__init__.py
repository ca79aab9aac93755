"""Environments by name. Each is a factory of single-use worlds."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.registry import Registry
from antiphon.core.types import Prompt
from antiphon.tasks.base import Environment

ENVIRONMENTS = Registry(
    "environment",
    {
        "frozen_lake": "antiphon.tasks.environments.frozen_lake:FrozenLake",
        "gem": "antiphon.tasks.environments.adapters:Gem",
        "guess_number": "antiphon.tasks.environments.guess_number:GuessNumber",
        "gymnasium": "antiphon.tasks.environments.adapters:Gymnasium",
        "openenv": "antiphon.tasks.environments.adapters:OpenEnv",
        "reasoning_gym": "antiphon.tasks.environments.adapters:ReasoningGym",
        "textarena": "antiphon.tasks.environments.adapters:TextArena",
        "textworld": "antiphon.tasks.environments.textworld:TextWorld",
        "tools": "antiphon.tasks.environments.tools:ToolUse",
    },
    group="antiphon.environments",
)


GEM_NAMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "game:Sokoban-v0-easy": ("sokoban", {"size": 6, "boxes": 2, "turns": 20}),
    "game:Sokoban-v0-hard": ("sokoban", {"size": 8, "boxes": 4, "turns": 50}),
}
"""What clients of ROCK and GEM call some of these environments, with the options that GEM registers."""


def required_options(name: str) -> tuple[str, ...]:
    """What the environment called `name` cannot be made without: options, or `prompt`."""
    parameters = inspect.signature(ENVIRONMENTS.resolve(name)).parameters.values()
    named = (each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
    return tuple(each.name for each in named if each.default is each.empty)


def is_blocking(name: str) -> bool:
    """Whether the environment called `name` may hold up whoever calls it: its methods are not `async`, and it does not say
    `inline = True`, which is for those that only compute for a moment."""
    found = ENVIRONMENTS.resolve(name)
    return not (getattr(found, "inline", False) or inspect.iscoroutinefunction(getattr(found, "step", None)))


def max_turns(name: str, options: Mapping[str, Any]) -> int | None:
    """Return the most turns that an episode of the environment `name` has with these options; None if it sets no limit."""
    limit = options.get("turns")
    if limit is None and name in ENVIRONMENTS.built_in:
        parameter = inspect.signature(ENVIRONMENTS.resolve(name)).parameters.get("turns")
        limit = parameter.default if parameter else None
    return limit if isinstance(limit, int) else None


def environment_factory(name: str, options: Mapping[str, Any]) -> Callable[[Prompt], Environment]:
    """What makes a world of the environment called `name` for a prompt. An environment with a parameter `prompt` is given it.
    `ConfigError` if it does not take `options`."""
    found = ENVIRONMENTS.resolve(name)
    signature = inspect.signature(found)
    asks = "prompt" in signature.parameters
    try:
        signature.bind(**options, **({"prompt": None} if asks else {}))
    except TypeError as error:
        raise ConfigError(f"environment {name!r} is called with (**options), but {error}") from None
    if getattr(found, "inline", False) and not asks:
        found(**options)  # so that what is wrong with a value is said before anything begins

    def make(prompt: Prompt) -> Environment:
        world: Environment = found(**options, **({"prompt": prompt} if asks else {}))
        return world

    return make
