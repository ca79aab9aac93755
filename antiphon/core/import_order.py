"""The place of a project's folder on the import path: after the standard library, before installed packages.

A file such as `numbers.py` beside a configuration would otherwise replace a module that libraries import. This module imports
nothing that such a file could replace.
"""

import os
import sys
from collections.abc import Sequence

_LIBRARY = os.path.dirname(os.__file__)


def find_end_of_library(path: Sequence[str]) -> int:
    """Return the index after the last entry of an import path that is part of the standard library; 0 if there is none."""
    parts = (_LIBRARY, os.path.join(_LIBRARY, "lib-dynload"))
    return 1 + max((index for index, entry in enumerate(path) if entry in parts), default=-1)


def find_hidden_file(module: str) -> str:
    """Return the file or folder of a project that a module of the standard library hides; empty if there is none.

    Args:
        module: Dotted name of the module that is to be imported.
    """
    top = module.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return ""
    for entry in sys.path[find_end_of_library(sys.path) :]:
        for file in (os.path.join(entry, f"{top}.py"), os.path.join(entry, top, "__init__.py")):
            if not entry.endswith("-packages") and os.path.isfile(file):
                return file
    return ""
