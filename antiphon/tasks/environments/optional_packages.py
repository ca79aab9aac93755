"""Import packages that only some environments need."""

import importlib
from typing import Any

from antiphon.core.errors import ConfigError


def import_optional(module: str, needed_by: str, package: str = "") -> Any:
    """Import a module of an optional package.

    Args:
        module: Import path.
        needed_by: What needs it, for the error.
        package: Name on the package index; without, the package is one of the extra `envs`.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != top:
            raise
        install = package or "'antiphon[envs]'"
        needed = package or top
        message = f"{needed_by} needs the package {needed}, which is not installed: pip install {install}"
        raise ConfigError(message, value=needed) from None
