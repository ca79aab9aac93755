"""Run the `antiphon` command with `python -m antiphon`."""

import os
import sys

# Python puts the working directory first on the import path. Commands that only read a run may be called in its directory and
# must import nothing from it. As with the command `antiphon`, the directory is left out, unless this package is in it.
_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if {"audit", "why", "diff", "replay", "regrade", "export", "serve", "eval", "branch"} & {
    *sys.argv[1:2]
} and os.getcwd() != _HOME:
    sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]

from antiphon.cli.app import main  # noqa: E402

if __name__ == "__main__":
    main()
