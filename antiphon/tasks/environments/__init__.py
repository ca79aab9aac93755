"""Environments by name. A name stands for a factory of single-use environments."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.registry import Registry
from antiphon.core.types import Prompt
from antiphon.core.user_errors import describe_error
from antiphon.tasks.base import Environment
from antiphon.tasks.environments.base import EnvironmentConfig, parse_options

ENVIRONMENTS = Registry(
    "environment",
    {
        "frozen_lake": "antiphon.tasks.environments.frozen_lake:FrozenLake",
        "gem": "antiphon.tasks.environments.adapters.gem:Gem",
        "guess_number": "antiphon.tasks.environments.guess_number:GuessNumber",
        "gymnasium": "antiphon.tasks.environments.adapters.gymnasium:Gymnasium",
        "openenv": "antiphon.tasks.environments.adapters.openenv:OpenEnv",
        "openreward": "antiphon.tasks.environments.adapters.openreward:OpenReward",
        "reasoning_gym": "antiphon.tasks.environments.adapters.reasoning_gym:ReasoningGym",
        "textarena": "antiphon.tasks.environments.adapters.textarena:TextArena",
        "textworld": "antiphon.tasks.environments.adapters.textworld:TextWorld",
        "tools": "antiphon.tasks.environments.tools.environment:ToolUse",
    },
    group="antiphon.environments",
)
"""The built-in environments, and those that installed packages register as entry points `antiphon.environments`."""


GEM_NAMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "game:Sokoban-v0-easy": ("sokoban", {"size": 6, "boxes": 2, "turns": 20}),
    "game:Sokoban-v0-hard": ("sokoban", {"size": 8, "boxes": 4, "turns": 50}),
}
"""Names that clients of ROCK and GEM use: the environment and its options, as GEM registers them."""


def required_options(name: str) -> tuple[str, ...]:
    """Return the options that an environment cannot be made without, and `prompt` if it needs its prompt."""
    found = ENVIRONMENTS.resolve(name)
    parameters = inspect.signature(found).parameters.values()
    named = (each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
    required = [each.name for each in named if each.default is each.empty]
    config = _config_model(found)
    fields = config.model_fields.items() if config else ()
    return (*required, *(option for option, field in fields if field.is_required()))


def is_blocking(name: str) -> bool:
    """Return True if an environment may block its caller: its methods are plain, and it does not say `inline = True`."""
    found = ENVIRONMENTS.resolve(name)
    return not (getattr(found, "inline", False) or inspect.iscoroutinefunction(getattr(found, "step", None)))


def max_turns(name: str, options: Mapping[str, Any]) -> int | None:
    """Return the most turns that an episode of the environment `name` has with these options; None if it sets no limit."""
    limit = options.get("turns")
    if limit is None and name in ENVIRONMENTS.known:
        config = _config_model(ENVIRONMENTS.resolve(name))
        field = config.model_fields.get("turns") if config else None
        limit = field.default if field else None
    return limit if isinstance(limit, int) else None


def environment_factory(name: str, options: Mapping[str, Any]) -> Callable[[Prompt], Environment]:
    """Return a function that makes an environment for a prompt; one with a parameter `prompt` is given the prompt.

    Raises:
        ConfigError: The environment does not exist, does not take `options`, or cannot be made.
    """
    found = ENVIRONMENTS.resolve(name)
    signature = inspect.signature(found)
    takes_prompt = "prompt" in signature.parameters
    if config := _config_model(found):
        parse_options(name, config, options)
    else:
        try:
            signature.bind(**options, **({"prompt": None} if takes_prompt else {}))
        except TypeError as error:
            message = f"environment {name!r} is called with (**options), but {error}"
            raise ConfigError(message, key="environment_options", value=options) from None
    if getattr(found, "inline", False) and not takes_prompt:
        try:
            found(**options)  # so that an error in making one is raised before the run
        except AntiphonError:
            raise
        except Exception as error:  # named boundary: user code
            message = f"environment {name!r} cannot be made: {describe_error(error, found)}"
            raise ConfigError(message, key="environment_options", value=options) from error

    def make(prompt: Prompt) -> Environment:
        environment: Environment = found(**options, **({"prompt": prompt} if takes_prompt else {}))
        return environment

    return make


def _config_model(environment: Any) -> type[EnvironmentConfig] | None:
    """Return the model of an environment's options; None if it declares none."""
    config = getattr(environment, "Config", None)
    return config if isinstance(config, type) and issubclass(config, EnvironmentConfig) else None
