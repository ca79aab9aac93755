"""The base of environments: options checked by a frozen pydantic model, a count of the turns that are left, and their errors.

An environment from another package needs none of this, only the methods of `tasks.base.Environment`. With it, options are
checked before a run starts, and errors name the option, its value and what is valid.
"""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from antiphon.core.config import Config
from antiphon.core.errors import ConfigError, Mistake
from antiphon.tasks.base import Reset, Step


class OptionError(ConfigError):
    """An option of an environment is unknown, missing or invalid.

    Attributes:
        environment: Name of the environment.
        key: Name of the option.
        value: Its value; None if it is missing.
        valid: The values that are valid; for an unknown option, the options that exist.
    """

    def __init__(
        self, message: str, *, environment: str = "", key: str = "", value: Any = None, valid: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self._set(Mistake(key, message, value, tuple(valid)))
        self.environment = environment


class EpisodeError(RuntimeError):
    """`step` was called before `reset`, or after the end of the episode."""


class EnvironmentConfig(Config):
    """Options of an environment; a subclass has one field an option. Frozen, strict in types, without unknown keys."""


class BaseEnvironment(ABC):
    """Base of environments: checks options and counts turns.

    A subclass sets `name`, declares its options as a nested class `Config`, and reads them from `self.config`. One that needs
    its prompt takes it as the first parameter, `prompt`. One whose methods are plain and only compute for a moment says
    `inline = True`; other plain ones run in processes of their own.
    """

    name: ClassVar[str]
    inline: ClassVar[bool] = False
    Config: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    config: EnvironmentConfig

    def __init__(self, **options: Any) -> None:
        """Check the options.

        Raises:
            OptionError: An option is unknown, missing or invalid.
        """
        self.config = parse_options(self.name, self.Config, options)
        self._turns_left = 0  # outside an episode

    @abstractmethod
    def reset(self, seed: int) -> Reset | Awaitable[Reset]:
        """Begin an episode; return the first observation and info."""

    @abstractmethod
    def step(self, action: str) -> Step | Awaitable[Step]:
        """Take one action; return observation, reward, terminated, truncated, info."""

    def close(self) -> Awaitable[None] | None:
        """Release what the environment holds; by default nothing."""
        return None

    def _check_running(self) -> None:
        """Raise `EpisodeError` outside an episode."""
        if not self._turns_left:
            raise EpisodeError("the episode is over or has not begun: call reset first")


C = TypeVar("C", bound=EnvironmentConfig)


def parse_options(environment: str, model: type[C], options: Mapping[str, Any]) -> C:
    """Validate the options of an environment.

    Raises:
        OptionError: An option is unknown, missing or invalid; the error's fields describe the first one.
    """
    try:
        return model.model_validate(dict(options), strict=True)
    except ValidationError as error:
        raise _option_error(environment, model, error) from None


def require(condition: bool, option: str, value: Any, valid: str) -> None:
    """Check a condition between options in a validator of an `EnvironmentConfig`.

    >>> require(0 < 4, "size", 4, "a whole number from 2")
    """
    if not condition:
        raise PydanticCustomError("option", "{valid}", {"option": option, "value": value, "valid": valid})


def _option_error(environment: str, model: type[EnvironmentConfig], error: ValidationError) -> OptionError:
    """Describe all mistakes in one message, an option a line."""
    problems: dict[str, tuple[Any, list[str]]] = {}
    for item in error.errors(include_url=False):
        context = item.get("ctx", {}) if item["type"] == "option" else {}
        key = str(context.get("option") or item["loc"][0])
        value = context.get("value", None if item["type"] == "missing" else item["input"])
        valid = context.get("valid") or item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        problems.setdefault(key, (value, []))[1].append(valid)
    lines = []
    for key, (value, alternatives) in problems.items():
        if key not in model.model_fields:
            nearest = difflib.get_close_matches(key, model.model_fields, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            lines.append(f"there is no option {key!r}: {hint}valid are {', '.join(model.model_fields) or 'none'}")
        elif alternatives == ["Field required"]:
            lines.append(f"option {key!r} is missing")
        else:
            lines.append(f"{key} is {value!r}, but must be {' or '.join(alternatives)}")
    key, (value, alternatives) = next(iter(problems.items()))
    valid = alternatives if key in model.model_fields else [*model.model_fields]
    message = "\n".join(f"environment {environment!r}: {line}" for line in lines)
    return OptionError(message, environment=environment, key=key, value=value, valid=valid)
