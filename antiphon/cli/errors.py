"""Turn errors into messages and exit codes, and keep files of a run that is only read from being imported.

Exit codes: 0 done; 1 the run or the check did not reach what was asked; 2 an error that the user can fix, shown as one
message without a traceback; 130 interrupted. Any other exception is a bug and shows its traceback.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from antiphon.core.errors import AntiphonError, printable


@contextmanager
def exit_on_error(*runs: Path) -> Iterator[None]:
    """Turn the errors that the user can fix, and Ctrl-C, into a message and an exit code.

    Args:
        runs: Run directories that are only read. Nothing in them is imported, and errors about them take one line.
    """
    try:
        for run in runs:
            forbid_imports_from(run)
        yield
    except AntiphonError as error:
        message = "; ".join(str(error).splitlines()) if runs else str(error)
        print(f"antiphon: {printable(message)}", file=sys.stderr)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as interrupt:
        print("antiphon: interrupted", file=sys.stderr)
        raise typer.Exit(130) from interrupt


def forbid_imports_from(run: Path) -> None:
    """Remove a run's folder from the import path of this process and of those it starts; installed packages in it stay."""
    folder = run.resolve()
    installed = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]

    def is_allowed(entry: str) -> bool:
        path = Path(entry or os.curdir).resolve()
        return not path.is_relative_to(folder) or any(path.is_relative_to(prefix) for prefix in installed)

    sys.path[:] = [entry for entry in sys.path if is_allowed(entry)]
