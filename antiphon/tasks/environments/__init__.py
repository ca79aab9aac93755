"""Environments by name. Each is a factory of single-use worlds."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from antiphon.errors import ConfigError
from antiphon.registry import Registry
from antiphon.tasks.base import Environment

ENVIRONMENTS = Registry("environment", {"guess_number": "antiphon.tasks.environments.guess_number:GuessNumber"})


def environment_factory(name: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """What makes one world of the environment called `name`, each time it is called with nothing.
    `ConfigError` if the environment does not take `options`."""
    found = ENVIRONMENTS.resolve(name)
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise ConfigError(f"environment {name!r} is called with (**options), but {error}") from None
    return functools.partial(found, **options)
