"""Packages that only some worlds need, of the extra `envs`."""

import importlib
from typing import Any

from antiphon.core.errors import ConfigError


def import_optional(package: str, purpose: str) -> Any:
    """The package of this name, of the extra `envs`; `ConfigError` if it is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(f"{purpose} needs the package {package}: pip install -e '.[envs]'") from None
