"""The base of adapters to environments of other libraries; a library is imported when its environment is made.

`info["valid"]` and `info["effective"]` are there where a library tells them. An episode is a success if its last reward is at
least `success_reward`.
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field

from antiphon.core.optional_packages import import_optional
from antiphon.tasks.environments.base import BaseEnvironment, EnvironmentConfig, OptionError


class AdapterConfig(EnvironmentConfig):
    """Options that all adapters of games have."""

    state: Literal["observation", "history"] = "history"
    """`info["state_key"]`: the observation, or everything said so far, which names the state even if observations hide some."""
    success_reward: float = Field(1.0, ge=-sys.float_info.max)
    """Last reward from which on an episode is a success."""


class LibraryConfig(AdapterConfig):
    """Options of an environment that a library makes by its id."""

    id: str
    """Name of the environment in its library."""
    options: Mapping[str, Any] = {}
    """Passed to the library's `make`."""


class Adapter(BaseEnvironment):
    """Base of adapters: builds `info`."""

    config: AdapterConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._history: list[str] = []

    def _import(self, module: str, package: str) -> Any:
        """Import the library; `ConfigError` if it is not installed."""
        return import_optional(module, f"environment {self.name!r}", package)

    def _reset_info(self, observation: str) -> dict[str, Any]:
        """Return the info of a reset."""
        return {"state_key": self._state_key("", observation)}

    def _step_info(self, action: str, observation: str, reward: float, over: bool, **known: bool) -> dict[str, Any]:
        """Return the info of a step; `known` is what the library tells about the action."""
        success = {"success": reward >= self.config.success_reward} if over else {}
        return {"state_key": self._state_key(action, observation), **known, **success}

    def _state_key(self, action: str, observation: str) -> str:
        if self.config.state == "observation":
            return observation
        self._history += [action, observation]
        return json.dumps(self._history)


def make_or_explain(
    environment: str, name: str, options: Mapping[str, Any], make: Callable[[], Any], key: str = "id"
) -> Any:
    """Call a library's `make`; `OptionError` if there is no such environment or it does not take the options."""
    try:
        return make()
    except Exception as error:  # named boundary: libraries raise anything about options
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise OptionError(
            f"environment {environment!r} cannot make {name!r} with options {dict(options)}: {reason}",
            environment=environment,
            key="options" if options else key,
            value=dict(options) or name,
        ) from error
