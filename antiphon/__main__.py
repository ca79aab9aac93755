"""Run the `antiphon` command with `python -m antiphon`."""

import os
import sys

from antiphon.core.import_order import find_end_of_library

# Python puts the working directory first on the import path. Commands that only read a run may be called in its directory and
# must import nothing from it. As with the command `antiphon`, the directory is left out, unless this package is in it. Other
# commands find it where they find the folder of a configuration, so that no file in it replaces one of the standard library.
_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.getcwd() != _HOME:
    sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]
    if not {"audit", "why", "diff", "replay", "regrade", "export", "serve", "eval", "branch"} & {*sys.argv[1:2]}:
        sys.path.insert(find_end_of_library(sys.path), os.getcwd())

from antiphon.cli.app import main  # noqa: E402

if __name__ == "__main__":
    main()
