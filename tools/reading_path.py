"""Check the line counts of `docs/reading_path.md` against the sources; `--write` updates them.

Each row of the page's table names a file and functions of it, each as `name` with its number of lines.
"""

import argparse
import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reading_path.md"
MOST_LINES = 1600  # of all functions on the path
TOLERANCE = 3  # lines that a function may have grown or shrunk by before the page must be updated

ROW = re.compile(r"\| \d+ \| `(?P<file>[\w/.]+\.py)` \|(?P<functions>[^|]*)\|")
FUNCTION = re.compile(r"`(?P<name>[\w.]+)` (?P<lines>\d+)")
TOTAL = re.compile(r"`(?P<lines>\d+)` lines in (?P<files>\d+) files")


@dataclass(frozen=True)
class Entry:
    """One function on the path: its file, its qualified name, and the number of lines that the page says."""

    file: str
    name: str
    lines: int


def read_page(text: str) -> list[Entry]:
    """Return the functions that the page names, in its order."""
    return [
        Entry(row["file"], function["name"], int(function["lines"]))
        for row in ROW.finditer(text)
        for function in FUNCTION.finditer(row["functions"])
    ]


def count_lines(file: str) -> dict[str, int]:
    """Return the number of lines of each function and class of a file, by qualified name."""
    counts: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                counts[name] = (child.end_lineno or first) - first + 1
                visit(child, f"{name}.")

    path = ROOT / file
    if path.is_file():
        visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return counts


def find_errors(text: str) -> list[str]:
    """Return what is wrong with the page, a line for each error."""
    entries = read_page(text)
    errors = []
    files = [row["file"] for row in ROW.finditer(text)]
    errors += [
        f"{file} is there twice: each file is read once" for file in sorted({f for f in files if files.count(f) > 1})
    ]
    total = 0
    for entry in entries:
        counts = count_lines(entry.file)
        if not counts:
            errors.append(f"{entry.file} does not exist: name the file that has `{entry.name}` now")
        elif entry.name not in counts:
            errors.append(f"{entry.file} has no `{entry.name}`: name the function that does its work now")
        elif abs(counts[entry.name] - entry.lines) > TOLERANCE:
            errors.append(f"{entry.file}: `{entry.name}` has {counts[entry.name]} lines, the page says {entry.lines}")
        total += counts.get(entry.name, 0)
    if total > MOST_LINES:
        errors.append(f"the path has {total} lines, {MOST_LINES} are allowed")
    said = TOTAL.search(text)
    if (
        said is None
        or abs(int(said["lines"].replace(",", "")) - total) > TOLERANCE * 5
        or int(said["files"]) != len(files)
    ):
        errors.append(f'the page must say "`{total}` lines in {len(files)} files"')
    return errors


def update(text: str) -> str:
    """Return the page with the line counts of today."""

    def update_row(row: re.Match[str]) -> str:
        counts = count_lines(row["file"])

        def update_function(function: re.Match[str]) -> str:
            return f"`{function['name']}` {counts.get(function['name'], function['lines'])}"

        return row[0].replace(row["functions"], FUNCTION.sub(update_function, row["functions"]))

    text = ROW.sub(update_row, text)
    total = sum(entry.lines for entry in read_page(text))
    files = len(list(ROW.finditer(text)))
    return TOTAL.sub(f"`{total}` lines in {files} files", text)


def main() -> None:
    """Print what is wrong, or write the page; exit 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="update the counts of the page")
    if parser.parse_args().write:
        PAGE.write_text(update(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    errors = find_errors(PAGE.read_text(encoding="utf-8"))
    print("\n".join(errors) or "the reading path is as the sources are")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
