"""Environments by name. Each is a factory of single-use worlds."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from antiphon.errors import ConfigError
from antiphon.registry import Registry
from antiphon.tasks.base import Environment
from antiphon.types import Prompt

ENVIRONMENTS = Registry(
    "environment",
    {
        "alfworld": "antiphon.tasks.environments.alfworld:AlfWorld",
        "guess_number": "antiphon.tasks.environments.guess_number:GuessNumber",
        "mini_swe": "antiphon.tasks.environments.mini_swe:MiniSWE",
        "textworld": "antiphon.tasks.environments.textworld:TextWorld",
    },
)


def needs_prompt(name: str) -> bool:
    """Whether the environment called `name` is made for a prompt, and cannot be without."""
    parameter = inspect.signature(ENVIRONMENTS.resolve(name)).parameters.get("prompt")
    return parameter is not None and parameter.default is parameter.empty


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

    def make(prompt: Prompt) -> Environment:
        world: Environment = found(**options, **({"prompt": prompt} if asks else {}))
        return world

    return make
