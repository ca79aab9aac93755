"""Print tables and lines whose text may come from a run."""

from collections.abc import Mapping
from typing import Any

from antiphon.core.errors import printable


def print_line(text: str) -> None:
    """Print a text that may come from a run, at once and without control characters."""
    print(printable(text), flush=True)


def print_table(left: str, right: str, rows: Mapping[str, object]) -> None:
    """Print a table of two columns with the headers `left` and `right`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=True, header_style="bold")
    for header in (left, right):
        table.add_column(Text(printable(header)), overflow="fold")  # a path that is cut off is of no use
    for name, value in rows.items():
        shown = f"{value:.4f}" if isinstance(value, float) else str(value)
        table.add_row(Text(printable(name)), Text(printable(shown)))
    Console().print(table)


def print_derived(numbers: Mapping[str, int]) -> None:
    """Print the numbers that follow from a configuration as YAML comments."""
    print("\n# Derived:")
    for name, number in numbers.items():
        print(f"#   {name:<38}{number:>14,}")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return nested measures under dotted names; a pair is an interval, shown as `low – high`."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        elif isinstance(value, tuple | list) and len(value) == 2:
            flat[prefix + name] = f"{value[0]:.4f} – {value[1]:.4f}"
        else:
            flat[prefix + name] = value
    return flat
