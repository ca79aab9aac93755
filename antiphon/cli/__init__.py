"""The command line: one module for each family of commands; `main` runs the `antiphon` command."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon.cli.app import main

__all__ = ["main"]


def __getattr__(name: str) -> "Callable[[], Any]":
    if name == "main":  # imported late, so that `python -m antiphon.cli.app` runs the module once
        from antiphon.cli.app import main

        return main
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
