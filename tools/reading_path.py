"""Check `docs/reading_path.md` against the sources; `--write` updates its line counts.

Each row of the page's table names a file and functions of it, each as `name` with its number of lines; `__doc__` is the
docstring of the module.

Each function must be mentioned by one that the path names before it: as an identifier, or as a string that is its name.
Types are not resolved, so a call of any `load` will do. Where the caller knows it by another name, the row has a note,
and the caller must mention that name: "`grpo` is chosen in row 5 through `resolve_advantage`".
"""

import argparse
import ast
import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reading_path.md"
MOST_LINES = 1600  # of all functions on the path
TOLERANCE = 3  # lines that a function may have grown or shrunk by before the page must be updated

ROW = re.compile(r"\| (?P<row>\d+) \| `(?P<file>[\w/.]+\.py)` \|(?P<functions>[^|]*)\|(?P<text>[^|]*)\|")
FUNCTION = re.compile(r"`(?P<name>[\w.]+)` (?P<lines>\d+)")
NOTE = re.compile(
    r"(?P<names>`[\w.]+`(?: and `[\w.]+`)?) (?:is|are) (?:called from|chosen in) row (?P<row>\d+)"
    r"(?: (?:as|through) `(?P<link>\w+)`)?"
)
TOTAL = re.compile(r"`(?P<lines>\d+)` lines in (?P<files>\d+) files")


@dataclass(frozen=True)
class Entry:
    """One function on the path: its row, its file, its qualified name, and the number of lines that the page says."""

    row: int
    file: str
    name: str
    lines: int


@dataclass(frozen=True)
class Note:
    """A caller of a function that the page names: a row, and what the caller calls it by."""

    row: int
    link: str


def read_page(text: str) -> list[Entry]:
    """Return the functions that the page names, in its order."""
    return [
        Entry(int(row["row"]), row["file"], function["name"], int(function["lines"]))
        for row in ROW.finditer(text)
        for function in FUNCTION.finditer(row["functions"])
    ]


def read_notes(text: str) -> dict[tuple[int, str], Note]:
    """Return the callers that the page names, by the row and the name of the function."""
    return {
        (int(row["row"]), name): Note(int(note["row"]), note["link"] or simple_name(name))
        for row in ROW.finditer(text)
        for note in NOTE.finditer(row["text"])
        for name in re.findall(r"`([\w.]+)`", note["names"])
    }


def simple_name(name: str) -> str:
    """Return a name without its classes."""
    return name.rpartition(".")[2]


@functools.cache
def find_definitions(file: str) -> dict[str, ast.stmt]:
    """Return each function and class of a file by qualified name, and the docstring of the module as `__doc__`."""
    found: dict[str, ast.stmt] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[f"{prefix}{child.name}"] = child
                visit(child, f"{prefix}{child.name}.")

    path = ROOT / file
    if path.is_file():
        module = ast.parse(path.read_text(encoding="utf-8"))
        visit(module, "")
        if ast.get_docstring(module):
            found["__doc__"] = module.body[0]
    return found


def count_lines(file: str) -> dict[str, int]:
    """Return the number of lines of each definition of a file, by qualified name."""
    counts = {}
    for name, node in find_definitions(file).items():
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        counts[name] = (node.end_lineno or first) - first + 1
    return counts


def find_mentions(file: str, name: str) -> set[str]:
    """Return the identifiers in the source of a function, and its strings: a worker's method is called by a string."""
    node = find_definitions(file).get(name)
    mentions: set[str] = set()
    for part in ast.walk(node) if node is not None else ():
        match part:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.alias(name=word) | ast.Constant(value=str(word)):
                mentions.add(word)
    return mentions


def find_unreached(text: str) -> list[str]:
    """Return an error for each function that none before it on the path mentions, and each note that is untrue."""
    notes, errors = read_notes(text), []
    mentions: dict[int, set[str]] = {}  # by the functions so far, by row
    for entry in read_page(text):
        name, note = simple_name(entry.name), notes.pop((entry.row, entry.name), None)
        if note is not None and note.link not in mentions.get(note.row, ()):
            errors.append(
                f"row {entry.row}: no function of row {note.row} before `{entry.name}` mentions `{note.link}`"
            )
        elif note is None and mentions and name != "__doc__" and not any(name in words for words in mentions.values()):
            errors.append(
                f"row {entry.row}: no function before `{entry.name}` mentions it: name its caller before it, or say "
                f'"`{entry.name}` is called from row … through `…`"'
            )
        mentions.setdefault(entry.row, set()).update(find_mentions(entry.file, entry.name))
    return errors + [f"row {row}: the note is about `{name}`, which the row does not name" for row, name in notes]


def find_errors(text: str) -> list[str]:
    """Return what is wrong with the page, a line for each error."""
    entries = read_page(text)
    errors = []
    files = [row["file"] for row in ROW.finditer(text)]
    if [int(row["row"]) for row in ROW.finditer(text)] != list(range(1, len(files) + 1)):
        errors.append(f"the rows are not numbered from 1 to {len(files)}")
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
    return errors + find_unreached(text) + find_unknown_names(text)


def find_unknown_names(text: str) -> list[str]:
    """Return an error for each name in the text of a row that no source has."""
    words = {word for path in (ROOT / "antiphon").rglob("*.py") for word in re.findall(r"\w+", path.read_text("utf-8"))}
    return [
        f"row {row['row']}: no source has `{name}`"
        for row in ROW.finditer(text)
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", row["text"])
        if simple_name(name) not in words
    ]


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
