"""Measure the code against the limits on its size and wording.

`python tools/house.py` prints a table and exits 1 if a limit is passed; `make check` runs it.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("antiphon", "antiphon_envs")

# Openings of docstrings that describe a question instead of naming what the function returns or does.
RIDDLE = re.compile(r"(What|Whether|Where|How|Of|Whoever|Who|Which|So many)\b")
# Docstrings that only point to another one. Overrides need no docstring: they inherit the one of their base.
REFERENCE = re.compile(r"(See|As) `[\w.]+`[^.]*\.?$")


@dataclass(frozen=True)
class Measure:
    """One measured value and its limit.

    Attributes:
        name: Key in the committed result.
        value: What was measured.
        limit: The largest allowed value; None if the value is only reported.
        places: Where the value comes from, the worst first.
    """

    name: str
    value: float
    limit: float | None
    places: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if the limit is passed, which fails the check."""
        return self.limit is not None and self.value > self.limit


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the root of the repository, its lines and its syntax tree."""

    path: Path
    lines: int
    tree: ast.Module


def read_sources() -> list[Source]:
    """Parse all files of the packages."""
    sources = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            sources.append(Source(path.relative_to(ROOT), text.count("\n"), ast.parse(text)))
    return sources


def iterate_functions(source: Source) -> Iterator[tuple[str, int, int]]:
    """Yield place, lines and parameters of each function of a file, nested ones included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            named = [each for each in parameters if each.arg not in ("self", "cls")]
            yield f"{source.path}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1, len(named)


def iterate_docstrings(source: Source) -> Iterator[tuple[str, str]]:
    """Yield place and text of each docstring of a file, those under attributes included."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for inner in node.body:
            if (
                isinstance(inner, ast.Expr)
                and isinstance(inner.value, ast.Constant)
                and isinstance(inner.value.value, str)
            ):
                yield f"{source.path}:{inner.lineno}", inner.value.value


def count_documentation(sources: list[Source]) -> int:
    """Count the lines of all docstrings."""
    return sum(text.count("\n") + 1 for source in sources for _, text in iterate_docstrings(source))


def list_root_entries() -> tuple[list[str], list[str]]:
    """List the entries of the package's folder, and those that are modules beside `__init__` and `__main__`."""
    entries = [path for path in (ROOT / "antiphon").iterdir() if path.is_dir() or path.suffix == ".py"]
    names = sorted(path.name for path in entries if path.name != "__pycache__")
    loose = [name for name in names if name.endswith(".py") and name not in ("__init__.py", "__main__.py")]
    return names, loose


def measure() -> list[Measure]:
    """Measure all that has a limit."""
    sources = read_sources()
    files = sorted(((source.lines, str(source.path)) for source in sources), reverse=True)
    functions = [each for source in sources for each in iterate_functions(source)]
    longest = sorted(functions, key=lambda each: -each[1])
    widest = sorted(functions, key=lambda each: -each[2])
    docstrings = [each for source in sources for each in iterate_docstrings(source)]
    riddles = tuple(place for place, text in docstrings if RIDDLE.match(text))
    references = tuple(place for place, text in docstrings if REFERENCE.match(text.strip()))
    entries, loose = list_root_entries()
    lines = sum(source.lines for source in sources)
    written = [source for source in sources if source.lines]
    return [
        Measure("largest_file", files[0][0], 500, tuple(f"{path} {size}" for size, path in files)),
        Measure("mean_file", round(lines / len(written), 1), 150),
        Measure("largest_function", longest[0][1], 60, tuple(f"{place} {size}" for place, size, _ in longest)),
        Measure("most_parameters", widest[0][2], None, tuple(f"{place} {count}" for place, _, count in widest)),
        Measure("root_entries", len(entries), 20),
        Measure("loose_modules", len(loose), 0, tuple(loose)),
        Measure("riddle_docstrings", len(riddles), 19, riddles),
        Measure("reference_docstrings", len(references), 0, references),
        Measure("package_lines", lines, None),
        Measure("docstring_lines", count_documentation(sources), None),
    ]


def main() -> None:
    """Print the table; exit 1 if a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--places", type=int, default=3, help="places shown for each measure that passes its limit")
    parser.add_argument("--all", action="store_true", help="show places of all measures")
    options = parser.parse_args()
    measures = measure()
    print(f"{'measure':<24}{'value':>10}{'limit':>10}")
    for each in measures:
        limit = "" if each.limit is None else f"{each.limit:g}"
        print(f"{each.name:<24}{each.value:>10g}{limit:>10}{'  PASSED THE LIMIT' if each.passed else ''}")
        if each.passed or options.all:
            print(*(f"    {place}" for place in each.places[: options.places]), sep="\n")
    sys.exit(any(each.passed for each in measures))


if __name__ == "__main__":
    main()
