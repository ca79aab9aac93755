"""`python -m antiphon`."""

import os
import sys

# Python puts the working directory first on the import path. Verbs that read a run may be called in it, and import nothing of
# it: as with the command `antiphon`, the directory is left out, unless this package lies there.
_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if {"audit", "why", "diff", "replay", "regrade", "export", "serve", "eval"} & {*sys.argv[1:2]} and os.getcwd() != _HOME:
    sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]

from antiphon.cli.app import main  # noqa: E402

if __name__ == "__main__":
    main()
