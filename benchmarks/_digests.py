"""Digests of the package's code, so that a result can record which code it measured.

A digest covers the syntax tree without comments, docstrings, formatting and imports, and takes top-level statements in sorted
order. Moving a file, or a definition within the digested modules, keeps the digest. Renaming an identifier changes it.
"""

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class _Normalizer(ast.NodeTransformer):
    """Remove imports, which change when files move, and docstrings."""

    def visit_Import(self, node: ast.Import) -> None:
        """Remove the import."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Remove the import."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Remove a string that stands alone."""
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


@cache
def _statement_digests(source: str) -> tuple[str, ...]:
    """Digest each top-level statement."""
    tree = _Normalizer().visit(ast.parse(source))
    for node in ast.walk(tree):
        if not getattr(node, "type_params", True):  # which Python has had since 3.12; a result may come from any
            del node.type_params
    options: dict[str, bool] = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    return tuple(hashlib.sha256(ast.dump(node, **options).encode()).hexdigest() for node in tree.body)


def find_files(name: str, root: Path = ROOT) -> list[Path]:
    """Return the files of a module or of all modules of a package; an empty list if it does not exist."""
    place = root.joinpath(*name.split("."))
    if place.is_dir():
        return sorted(place.rglob("*.py"))
    return [file] if (file := place.with_suffix(".py")).exists() else []


def digest_files(paths: Iterable[Path]) -> str:
    """Digest the code of some files, to twelve hexadecimal digits."""
    found = sorted(each for path in paths for each in _statement_digests(path.read_text(encoding="utf-8")))
    return hashlib.sha256("".join(found).encode()).hexdigest()[:12]


def digest_modules(names: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """Digest each module or package.

    Raises:
        FileNotFoundError: One of them does not exist.
    """
    found = {name: find_files(name, root) for name in names}
    if missing := [name for name, paths in found.items() if not paths]:
        raise FileNotFoundError(f"MEASURES names modules that do not exist: {', '.join(missing)}")
    return {name: digest_files(paths) for name, paths in found.items()}


def digest_all(root: Path = ROOT) -> Iterator[str]:
    """Digest every module and every package of the repository."""
    package = root / "antiphon"
    for path in package.rglob("*.py"):
        yield digest_files([path])
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        yield digest_files(folder.rglob("*.py"))
