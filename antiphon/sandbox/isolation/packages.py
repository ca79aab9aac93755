"""Finds the files of installed Python packages, so that sandboxes can be given them."""

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from antiphon.core.errors import ConfigError


def locate_packages(names: tuple[str, ...]) -> dict[str, str]:
    """Return the top-level files and directories of distributions and of everything they require, as name -> path.

    Raises:
        ConfigError: A distribution is not installed.
    """
    found: dict[str, str] = {}
    pending, seen = list(names), set()
    while pending:
        name = canonicalize_name(pending.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError(f"{name!r} is not installed", key="sandbox.packages", value=name) from error
        for file in distribution.files or []:
            if file.parts[0] not in {"..", "__pycache__"}:
                found[file.parts[0]] = str(Path(str(distribution.locate_file(file.parts[0]))).resolve())
        required = map(Requirement, distribution.requires or [])
        pending += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found
