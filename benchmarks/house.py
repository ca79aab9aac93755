"""Size and shape of the code, before the move to the present rooms and today.

    python benchmarks/house.py

Lines are those of all Python files, comments, docstrings and blank lines included. Environments that moved to
`antiphon_envs` are counted apart. Limits are checked by `make check`; this writes the figures.
"""

import argparse
import sys
from pathlib import Path
from subprocess import run

from _common import ROOT, table, write_result

sys.path.insert(0, str(ROOT / "tools"))

import house
import reading_path

BEFORE = "bf9c551"  # the last commit with all modules where they were


def lines_at(commit: str, folder: str) -> int:
    """Return the number of lines of the Python files that a commit has below a folder.

    Raises:
        CalledProcessError: The checkout does not have the commit.
    """
    counted = run(
        ["git", "grep", "--count", "", commit, "--", f"{folder}/**.py", f"{folder}/*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sum(int(line.rsplit(":", 1)[1]) for line in counted.stdout.splitlines())


def main() -> None:
    """Print the figures and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default=BEFORE, help="commit to compare with")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sources = house.read_sources()
    figures = {each.name: each.value for each in house.measure() if each.name != "package_lines"}
    moved = sum(source.lines for source in sources if source.path.parts[0] == "antiphon_envs")
    page = reading_path.read_page(reading_path.PAGE.read_text(encoding="utf-8"))
    figures |= {
        "package_lines_before": lines_at(options.before, "antiphon"),
        "package_lines_after": sum(source.lines for source in sources) - moved,
        "moved_lines": moved,
        "reading_path_lines": sum(reading_path.count_lines(entry.file)[entry.name] for entry in page),
    }
    print(table(["figure", "value"], [[name, f"{value:g}"] for name, value in figures.items()]))
    print("written:", write_result("house", figures, options.out, measures=("antiphon", "antiphon_envs")))


if __name__ == "__main__":
    main()
