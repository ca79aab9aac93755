"""Packages that only some runs need: those of the extras of the distribution `antiphon`, and a few that go by themselves."""

import functools
import importlib
import re
from importlib.metadata import PackageNotFoundError, metadata, requires
from typing import Any

from antiphon.core.errors import ConfigError

BUNDLES = ("dev", "trackers")  # extras of which each part has one of its own, or none


@functools.cache
def list_extras() -> dict[str, str]:
    """Return the extra that installs each optional distribution; `BUNDLES` are not among them.

    Antiphon's own metadata is the only list. There is none where a checkout that was never installed is on the import path.
    """
    try:
        from packaging.requirements import Requirement  # absent in the environments of some engines

        extras = metadata("antiphon").get_all("Provides-Extra") or []
        needed = [Requirement(text) for text in requires("antiphon") or []]
    except (PackageNotFoundError, ModuleNotFoundError):
        return {}
    return {
        normalize_name(each.name): extra
        for extra in extras
        for each in needed
        if extra not in BUNDLES and each.marker and each.marker.evaluate({"extra": extra})
    }


def normalize_name(distribution: str) -> str:
    """Return a distribution's name in the spelling of package indexes."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def how_to_install(distribution: str) -> str:
    """Return the command that installs a distribution: by the extra that has it, if one does."""
    extra = list_extras().get(normalize_name(distribution))
    return f"pip install 'antiphon[{extra}]'" if extra else f"pip install {distribution}"


def import_optional(module: str, needed_by: str, package: str = "") -> Any:
    """Import a module of an optional package.

    Args:
        module: Import path.
        needed_by: What needs it, for the error.
        package: Name of the distribution, if it is not the module's.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != top:
            raise
        needed = package or top
        message = f"{needed_by} needs the package {needed}, which is not installed: {how_to_install(needed)}"
        raise ConfigError(message, value=needed) from None
