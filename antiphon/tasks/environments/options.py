"""Options of environments: what is wrong with one is said at once."""

from typing import Any

from antiphon.core.errors import ConfigError


def require(kept: bool, environment: str, option: str, value: Any, valid: str) -> None:
    """`ConfigError` unless `kept`: the option's value is not valid.

    >>> require(0 < 4, "frozen_lake", "size", 4, "a whole number from 2")
    """
    if not kept:
        raise ConfigError(f"environment {environment!r}: {option} is {value!r}, but must be {valid}")


def require_whole(environment: str, option: str, value: Any, least: int, most: int | None = None) -> None:
    """`ConfigError` unless `value` is a whole number from `least` to `most`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    upper = "" if most is None else f" to {most}"
    kept = whole and least <= value and (most is None or value <= most)
    require(kept, environment, option, value, f"a whole number from {least}{upper}")


def require_number(environment: str, option: str, value: Any, least: float, most: float | None = None) -> None:
    """`ConfigError` unless `value` is a number from `least` to `most`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    upper = "" if most is None else f" to {most:g}"
    kept = number and least <= value and (most is None or value <= most)
    require(kept, environment, option, value, f"a number from {least:g}{upper}")
