"""The generated reference has everything that it claims to list, and the site is whole."""

import ast
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import antiphon
from antiphon.cli.app import app
from antiphon.record import schema
from antiphon.record.events import EVENTS
from antiphon.record.metric_descriptions import find_undescribed
from antiphon.record.trajectories import SCHEMA_WITH_IMAGES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import reference  # noqa: E402

PAGES = reference.build_pages()
KEYS = [line.partition(" = ")[0].split(": ") for line in (ROOT / "tests/unit/options.txt").read_text().splitlines()]


def rows_of(text):
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines() if "|" in line]


@pytest.mark.parametrize("command", ["train", "dpo", "reward-model", "distill"])
def test_every_key_has_a_row(command):
    page = PAGES["configuration.md"]
    if command != "train":
        page = PAGES["offline_configuration.md"].split(f"## `antiphon {command}`")[1].split("\n## ")[0]
    found = [row[0].strip("`") for row in rows_of(page)]
    assert [key for whose, key in KEYS if whose == command and key not in found] == []


def test_every_command_and_option_is_listed():
    page = PAGES["command_line.md"]
    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        assert f"## `antiphon {name}`" in page
        section = page.split(f"## `antiphon {name}`")[1].split("\n## ")[0]
        assert [
            each.opts for each in command.params if each.opts[0] not in section and each.opts[0].startswith("-")
        ] == []


def test_every_public_name_is_documented():
    assert re.findall(r"^::: antiphon\.(\w+)$", PAGES["python_api.md"], re.MULTILINE) == antiphon.__all__


def test_ledger_columns_are_those_of_the_database():
    database = sqlite3.connect(":memory:")
    database.executescript(schema.tables())
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##)", PAGES["run_directory.md"], re.DOTALL | re.MULTILINE))
    assert sorted(sections) == sorted(tables)
    for table in tables:
        rows = rows_of(sections[table])[2:]
        columns = list(database.execute(f"PRAGMA table_info({table})"))
        assert [row[0].strip("`") for row in rows] == [column[1] for column in columns]
        assert ["NULL" not in row[1] for row in rows] == [bool(column[3] or column[5]) for column in columns]
        assert all(row[2] for row in rows), table


def test_parquet_columns_are_those_of_the_files():
    rows = rows_of(PAGES["run_directory.md"].split("## Trajectories")[1])[2:]
    assert [row[0].strip("`") for row in rows] == SCHEMA_WITH_IMAGES.names and all(row[2] for row in rows)


def calls_of_add():
    """Yield the kind and the fields of each event that the package records."""
    for path in (ROOT / "antiphon").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=(ast.Name() | ast.Attribute()) as owner, attr="add")):
                    if ast.unparse(owner).endswith("events"):
                        kinds = [each.value for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant)]
                        yield from ((kind, {each.arg for each in node.keywords}) for kind in kinds)


def test_every_event_is_described_with_its_fields():
    recorded = list(calls_of_add())
    assert {kind for kind, _ in recorded} == set(EVENTS)
    assert [kind for kind, fields in recorded if fields != {*EVENTS[kind][0].split()}] == []


def test_metrics_without_description_are_found():
    known = [
        "reward/mean",
        "age/0",
        "reward/part/sums/format/right",
        "critic/1/value",
        "drops/stale",
        "evaluation/a/score",
    ]
    assert find_undescribed(known) == []
    assert find_undescribed(["reward/meen", "learner/novelty", "age/0/1", "critic/1/other"]) == [
        *("reward/meen", "learner/novelty", "age/0/1", "critic/1/other")
    ]


def test_metrics_shown_during_a_run_are_described():
    text = (ROOT / "antiphon" / "record" / "live.py").read_text()
    shown = set(re.findall(r'", "(\w+/[\w/]+)"', text))
    assert len(shown) > 15 and find_undescribed(shown) == []


def test_every_error_has_a_cause_and_a_cure():
    tree = ast.parse((ROOT / "antiphon" / "core" / "errors.py").read_text())
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Error")}
    listed = {name: (cause, cure) for name, cause, cure in reference.list_errors()}
    assert listed.keys() == classes - {"AntiphonError", "ValidatorError"}
    assert all(cause and cure for cause, cure in listed.values())


def test_site_is_whole_and_fetches_nothing(tmp_path):
    """Strict, which `--quiet` would disable: a broken link, an unknown reference or a page outside the navigation fails."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    fetched = (
        r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//|<link[^>]*rel=["']?(?:style|preconn)[^>]*//"""
    )
    assert len(pages) > 40 and [page for page in pages if re.search(fetched, page.read_text())] == []
    imported = r"@import|url\(['\"]?(?:https?:)?//"
    assert [style for style in tmp_path.rglob("*.css") if re.search(imported, style.read_text())] == []
    assert "async_ratio" in (tmp_path / "search" / "search_index.js").read_text()
