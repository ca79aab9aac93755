"""Models and data sets of ModelScope. Its own client downloads them to its cache, with the settings in its variables."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from antiphon.core.errors import DataError
from antiphon.core.optional_packages import import_optional

_PATH = re.compile(r"modelscope:([^/:\s]+/[^/:\s]+)")


def modelscope_id(path: str) -> str:
    """Return OWNER/NAME of the path modelscope:OWNER/NAME of a model; an empty text if it is no such path."""
    found = _PATH.fullmatch(path)
    return found[1] if found else ""


def download(name: str, kind: Literal["model", "dataset"], patterns: Sequence[str] | None = None) -> Path:
    """Return the directory with the files of a model or a data set.

    Args:
        name: OWNER/NAME.
        kind: Which of both.
        patterns: Names of the files that are needed; None stands for all.

    Raises:
        ConfigError: The client of ModelScope is not installed.
        DataError: There is no such model or data set, or it cannot be downloaded.
    """
    hub = import_optional("modelscope_hub", f"the {kind} {name!r} of ModelScope", "modelscope-hub")
    try:
        return Path(hub.HubApi().download_repo(name, kind, allow_patterns=None if patterns is None else list(patterns)))
    except (hub.HubError, OSError, ValueError) as error:  # the errors of its HTTP client are `OSError`
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"{kind} {name!r} cannot be downloaded from ModelScope: {reason}", path=name) from error
