"""The reference pages of the documentation, generated from the code that they describe.

    python tools/reference.py [DIR]     # write the pages to DIR, or list them

`tools/docs_site.py` adds them to the site; they are not committed.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from antiphon.core.config import Config  # noqa: E402
from antiphon.inspect.options import Option, list_options  # noqa: E402

NOTE = "This page is generated from the code.\n"
SINCE = "A key whose meaning names no version has been there since 0.1.0."


def build_pages() -> dict[str, str]:
    """Return all pages, by their path below `reference/`."""
    return {
        "configuration.md": describe_training(),
        "offline_configuration.md": describe_offline(),
        "command_line.md": describe_commands(),
        "python_api.md": describe_python(),
        "metrics.md": describe_metrics(),
        "run_directory.md": describe_run_directory(),
        "errors.md": describe_errors(),
    }


def table(*rows: tuple[str, ...]) -> str:
    """Format a Markdown table, the first row as its heading."""
    lines = ["| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


# --- configuration -------------------------------------------------------------------------------------------------------


def describe_training() -> str:
    """Describe the configuration of `antiphon train` and `antiphon sft`."""
    options = list_options(_model("train"))
    return f"""# Configuration

{NOTE}
All {len(options)} keys of a run's YAML file, for `antiphon train` and `antiphon sft`. `antiphon options KEY` prints
the same on the command line. `[]` marks the items of a list, and every key can be set on the command line:
`rollout.async_ratio=2`. An unknown key or a value out of bounds is an error that names the file, the key and what
is valid. {SINCE}

{_describe_sections(_model("train"), options)}"""


def describe_offline() -> str:
    """Describe the configurations of the offline commands."""
    parts = [f"# Configuration of the offline commands\n\n{NOTE}\n{SINCE}\n"]
    for command in ("dpo", "reward-model", "distill"):
        options = list_options(_model(command))
        parts.append(f"## `antiphon {command}`\n\n{len(options)} keys.\n\n{_options_table(options)}")
    return "\n".join(parts)


def _describe_sections(model: type, options: list[Option]) -> str:
    sections: dict[str, list[Option]] = {}
    for option in options:
        section, dot, _ = option.key.replace("[]", "").partition(".")
        sections.setdefault(section if dot else "", []).append(option)
    parts = []
    for name, found in sections.items():
        declared = model if not name else _section_model(model.model_fields[name].annotation)
        file = declared.__module__.replace(".", "/") + ".py"
        title = f"`{name}`" if name else "The run"
        parts.append(f"## {title}\n\nDeclared in `{file}`, class `{declared.__name__}`.\n\n{_options_table(found)}")
    return "\n".join(parts)


def _section_model(annotation: Any) -> type | None:
    """Return the configuration model in an annotation such as `SftConfig | None` or `tuple[TaskConfig, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    return next(filter(None, map(_section_model, get_args(annotation))), None)


def _options_table(options: list[Option]) -> str:
    rows = [
        (f"`{each.key}`", f"{each.type}", f"`{each.default}`" if each.default else "required", each.meaning)
        for each in options
    ]
    return table(("key", "type and bounds", "default", "meaning"), *rows)


def _model(command: str) -> type:
    from antiphon.cli.options import MODELS

    module, _, name = MODELS[command].partition(":")
    return getattr(import_module(module), name)


# --- commands, Python -----------------------------------------------------------------------------------------------------


def describe_commands() -> str:
    """Describe the commands from their typer definitions."""
    import typer
    from typer.cli import get_docs_for_click

    from antiphon.cli.app import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="antiphon", title="Command line")
    text = re.sub(r"^\*\*Commands\*\*:\n\n(?:\* .*\n)+\n", "", text, flags=re.MULTILINE)  # which cuts their help off
    return text.replace("\n\n", f"\n\n{NOTE}\n", 1)


def describe_python() -> str:
    """Return the page of public names, which mkdocstrings fills in from their docstrings."""
    import antiphon

    names = "\n".join(f"::: antiphon.{name}\n" for name in antiphon.__all__)
    return f"# Python API\n\n{NOTE}\nEverything here can be imported from `antiphon`.\n\n{names}"


# --- what a run writes ----------------------------------------------------------------------------------------------------


def describe_metrics() -> str:
    """Describe metrics and events."""
    from antiphon.record.events import EVENTS, RARE
    from antiphon.record.metric_descriptions import METRICS
    from antiphon.record.metrics import find_reduction

    metrics = [(f"`{name}`", find_reduction(name), meaning) for name, meaning in METRICS.items()]
    events = [
        (f"`{kind}`", fields.replace(" ", ", "), meaning, "yes" if kind in RARE else "")
        for kind, (fields, meaning) in EVENTS.items()
    ]
    return f"""# Metrics and events

{NOTE}
## Metrics

A line of `metrics.jsonl` has the metrics of one step, with its number (`step`) and its `lineage`. Values that are
recorded several times in a step are reduced to one as the second column says. `<…>` stands for a name: a task, a
part of its score, a critic. Metrics of a loss, advantage or stage of your own appear beside these: those of a loss
as `learner/<name>`.

{table(("metric", "reduction", "meaning"), *metrics)}
## Events

With `record.events: true` a run writes `events.jsonl`: one JSON object a line, with the seconds since the run began
(`t`) and the kind (`event`). Rare events are always in the ledger's table `events`. An `attempt` is written
`group.sibling.try`, a `request` as its attempt and turn.

{table(("event", "fields", "meaning", "in the ledger"), *events)}"""


def describe_run_directory() -> str:
    """Describe the tables of the ledger and the columns of the trajectory files."""
    from antiphon.record import schema
    from antiphon.record.trajectories import COLUMNS, SCHEMA_WITH_IMAGES

    columns = [
        (f"`{name}`", str(SCHEMA_WITH_IMAGES.field(name).type).replace("<", "&lt;"), meaning)
        for name, meaning in COLUMNS.items()
    ]
    ledger = "\n".join(
        _describe_table(text) for text in re.split(r"(?=^CREATE TABLE)", schema.tables(), flags=re.M)[1:]
    )
    return f"""# Schema of a run directory

{NOTE}
[The record of a run](../record.md) says which files there are and what they guarantee. The schema of ledger and
trajectories has version
{schema.VERSION}, which `PRAGMA user_version` of `ledger.db` returns.

## Ledger: `ledger.db`

{inspect.getdoc(schema).split(chr(10), 1)[1].strip()}

{ledger}
## Trajectories: `rollouts/*.parquet`

One row a segment. Columns that describe the attempt are repeated in the rows of its segments.

{table(("column", "type", "meaning"), *columns)}"""


def _describe_table(text: str) -> str:
    """Describe a table from its SQL, whose comments say what columns mean."""
    head, *lines = text.strip().splitlines()
    name, note = re.match(r"CREATE TABLE (\w+) \(\s*(?:-- (.*))?", head).groups()
    columns = [
        re.match(r" +(\w+) ([A-Z ]+?)(?: DEFAULT \d)?(?: REFERENCES \w+)?,?\s*(?:-- (.*))?$", line) for line in lines
    ]
    rows = [
        (
            f"`{column}`",
            kind.split()[0].lower() + ("" if "NOT NULL" in kind or "KEY" in kind else ", may be NULL"),
            meaning or "",
        )
        for column, kind, meaning in (found.groups() for found in columns if found)
    ]
    key = re.search(r"PRIMARY KEY \((.*)\)", text)
    keys = key.group(1) if key else rows[0][0].strip("`")
    intro = f"{note[0].upper()}{note[1:]}. " if note else ""
    return f"### `{name}`\n\n{intro}Primary key: {keys}.\n\n{table(('column', 'type', 'meaning'), *rows)}"


# --- errors ---------------------------------------------------------------------------------------------------------------


def describe_errors() -> str:
    """Describe the errors of `antiphon/core/errors.py`: their cause, and their cure."""
    rows = [(f"`{name}`", cause, cure) for name, cause, cure in list_errors()]
    return f"""# Errors

{NOTE}
Every error that ends a run is an `AntiphonError` of one of these classes, and is printed as one message without a
traceback. A rollout that fails raises no error: it is recorded as a [failure](../statuses.md#failures).

{table(("error", "cause", "cure"), *rows)}"""


def list_errors() -> Iterator[tuple[str, str, str]]:
    """Yield name, cause and cure of each class of errors, from its docstring."""
    tree = ast.parse((ROOT / "antiphon" / "core" / "errors.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "AntiphonError" for base in node.bases):
            text = ast.get_docstring(node) or ""
            cure = re.search(r"^Cure: (.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
            yield node.name, text.split("\n\n")[0], cure.group(1) if cure else ""


def main() -> int:
    """Write the pages."""
    pages = build_pages()
    for name, text in pages.items():
        if sys.argv[1:]:
            (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
