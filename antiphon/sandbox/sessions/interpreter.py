"""Gives shell sandboxes a Python: the interpreter that runs here, its standard library, and selected packages only.

A sandbox sees hard links to the files of this machine, or copies if they lie on another disk. Its user therefore needs no
access to the directories that hold the originals.
"""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from antiphon.sandbox.isolation import levels
from antiphon.sandbox.isolation.packages import locate_packages
from antiphon.sandbox.sessions.config import PATH, ShellSandboxConfig

OPTIONAL = "/opt"  # where a sandbox finds the commands and the packages
SYSTEM = "/usr"  # every sandbox has it

_LEFT_OUT = shutil.ignore_patterns(
    "*-packages", "test", "idlelib", "ensurepip", "tkinter", "lib2to3", "turtledemo", "config-*"
)
_COMMANDS = {"pytest": '#!/bin/sh\nexec python -m pytest "$@"\n'}


def with_python(config: ShellSandboxConfig, directory: Path, packages: tuple[str, ...]) -> ShellSandboxConfig:
    """Return `config` with a command `python` that can import `packages` and their requirements.

    Args:
        config: The configuration to extend.
        directory: Filled with the files; it must last as long as the sandboxes.
        packages: Installed distributions.

    Raises:
        ConfigError: A package is not installed.
    """
    optional, empty = directory / "optional", directory / "nothing"
    empty.mkdir(parents=True)
    _fill_optional(optional, packages)
    mounts = {OPTIONAL: optional, **{str(place): empty for place in _system_package_dirs()}}
    if not _below(sys.base_prefix, SYSTEM):
        mounts[sys.base_prefix] = directory / "python"
        for path in levels.python_sources():
            if _below(path, sys.base_prefix):
                _link(Path(path), directory / "python" / os.path.relpath(path, sys.base_prefix))
    environment = {"PATH": f"{OPTIONAL}/bin:{PATH}", "PYTHONPATH": f"{OPTIONAL}/packages"}
    return replace(config, mounts={**config.mounts, **mounts}, environment={**config.environment, **environment})


def _fill_optional(optional: Path, packages: tuple[str, ...]) -> None:
    (optional / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        (optional / "bin" / name).symlink_to(os.path.realpath(sys.executable))
    for name, script in _COMMANDS.items():
        (optional / "bin" / name).write_text(script, encoding="ascii")
        (optional / "bin" / name).chmod(0o755)
    for name, path in locate_packages(packages).items():
        _link(Path(path), optional / "packages" / name)


def _system_package_dirs() -> set[Path]:
    """Return the directories with installed packages that every sandbox would see."""
    return {
        place.resolve()
        for parent in (SYSTEM, f"{SYSTEM}/local")
        for place in Path(parent).glob("lib*/python3*/*-packages")
        if place.is_dir()
    }


def _below(path: str, directory: str) -> bool:
    return os.path.commonpath([path, directory]) == directory


def _link(source: Path, target: Path) -> None:
    """Link a file or tree to another place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=_LEFT_OUT, copy_function=_link_file)
    else:
        _link_file(source, target)


def _link_file(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another disk
        shutil.copy2(source, target, follow_symlinks=False)
