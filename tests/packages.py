"""Packages of other people, installed by pip from a folder, offline."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "{module}"
version = "1.0"

[project.entry-points."{group}"]
{entry}

[tool.setuptools]
py-modules = ["{module}"]
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *, module: str, code: str, group: str, entry: str) -> None:
    """Install a package with one module and one entry point where processes started from now on find it.

    Args:
        folder: Holds the package's source, and what is installed.
        monkeypatch: Sets PYTHONPATH.
        module: Name of the module, and of the package.
        code: Source of the module.
        group: Group of the entry point.
        entry: The entry point, such as `name = "module:attribute"`.
    """
    pytest.importorskip("setuptools")
    source, target = folder / "source", folder / "site"
    source.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT.format(module=module, group=group, entry=entry))
    (source / f"{module}.py").write_text(code)
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, source], check=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")]))
