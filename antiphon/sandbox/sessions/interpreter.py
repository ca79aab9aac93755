"""Python for boxes: the interpreter that runs here with its standard library, the packages that are asked for, and no other.

What a box sees of them are links to the files of this machine, or copies where they lie on another disk: whoever is in the box
need not be allowed to pass through the directories that lead to them.
"""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from antiphon.sandbox.isolation import levels
from antiphon.sandbox.isolation.packages import locate_packages
from antiphon.sandbox.sessions.config import PATH, ShellSandboxConfig

OPTIONAL = "/opt"  # where a box finds the commands and the packages
SYSTEM = "/usr"  # every box has it

_LEFT_OUT = shutil.ignore_patterns(
    "*-packages", "test", "idlelib", "ensurepip", "tkinter", "lib2to3", "turtledemo", "config-*"
)
_COMMANDS = {"pytest": '#!/bin/sh\nexec python -m pytest "$@"\n'}


def with_python(config: ShellSandboxConfig, directory: Path, packages: tuple[str, ...]) -> ShellSandboxConfig:
    """`config` with `python` as a command that can import installed `packages` and what they require. `directory` is filled
    with what that takes, and must last as long as the boxes do. `ConfigError` for a package that is not installed."""
    optional, nothing = directory / "optional", directory / "nothing"
    nothing.mkdir(parents=True)
    _fill_optional(optional, packages)
    mounts = {OPTIONAL: optional, **{str(place): nothing for place in _packages_of_the_system()}}
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


def _packages_of_the_system() -> set[Path]:
    """Directories that every box sees and in which packages are installed."""
    return {
        place.resolve()
        for parent in (SYSTEM, f"{SYSTEM}/local")
        for place in Path(parent).glob("lib*/python3*/*-packages")
        if place.is_dir()
    }


def _below(path: str, directory: str) -> bool:
    return os.path.commonpath([path, directory]) == directory


def _link(source: Path, target: Path) -> None:
    """A file or tree at another place."""
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
