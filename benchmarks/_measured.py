"""A digest of code: what a result keeps of the modules that it measured, so that one can tell later whether they changed.

It is of the syntax tree, without comments, docstrings, formatting and imports, and of top-level statements in no order: moving
a file, or a definition within what is named, leaves it as it is. Renaming an identifier changes it.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class _Bare(ast.NodeTransformer):
    """Takes away imports and strings that stand alone."""

    def visit_Import(self, node: ast.Import) -> None:
        """Dropped: where a name comes from changes when files move."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Dropped."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Kept unless it is a docstring."""
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


@cache
def statements(source: str) -> tuple[str, ...]:
    """A digest of each top-level statement that does something."""
    tree = _Bare().visit(ast.parse(source))
    return tuple(hashlib.sha256(ast.dump(node).encode()).hexdigest() for node in tree.body)


def files(name: str, root: Path = ROOT) -> list[Path]:
    """The files of a module, or of all modules of a package; none if it is not there."""
    place = root.joinpath(*name.split("."))
    return (
        sorted(place.rglob("*.py"))
        if place.is_dir()
        else [place.with_suffix(".py")] * place.with_suffix(".py").exists()
    )


def digest(paths: Iterable[Path]) -> str:
    """What these files do, in twelve digits."""
    found = sorted(each for path in paths for each in statements(path.read_text(encoding="utf-8")))
    return hashlib.sha256("".join(found).encode()).hexdigest()[:12]


def digests(names: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """The digest of each module or package.

    Raises:
        FileNotFoundError: One of them is not there.
    """
    found = {name: files(name, root) for name in names}
    if missing := [name for name, paths in found.items() if not paths]:
        raise FileNotFoundError(f"MEASURES names what is not there: {', '.join(missing)}")
    return {name: digest(paths) for name, paths in found.items()}


def everywhere(root: Path = ROOT) -> Iterator[str]:
    """The digests of all modules and packages that there are."""
    package = root / "antiphon"
    for path in package.rglob("*.py"):
        yield digest([path])
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        yield digest(folder.rglob("*.py"))
