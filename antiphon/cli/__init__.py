"""The command line: one module for each family of commands; `main` runs the `antiphon` command."""

from antiphon.cli.app import main

__all__ = ["main"]
