"""Find the runs below a folder. Names come from this list alone, so that no request leads out of the folder."""

import os
import time
from pathlib import Path

from antiphon.core.errors import ConfigError
from antiphon.dashboard.errors import NotFoundError

DEEPEST = 4  # folders between the one that is served and a run
MOST_RUNS = 5_000
MOST_FOLDERS = 50_000  # that are looked into
FRESH_SECONDS = 2.0  # for which a list of runs is used again


class RunFolder:
    """The folder that is served: all runs below it, or one run."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not self.root.is_dir():
            raise ConfigError("is no folder", path=str(root))
        self._runs: dict[str, Path] = {}
        self._read = float("-inf")

    def list_runs(self) -> dict[str, Path]:
        """Return the directory of each run by its name, which is its path from the folder."""
        if time.monotonic() - self._read > FRESH_SECONDS:
            self._runs, self._read = self._scan(), time.monotonic()
        return self._runs

    def find(self, name: str) -> Path:
        """Return the directory of a run.

        Raises:
            NotFoundError: The folder has no such run.
        """
        found = self.list_runs().get(name)
        if found is None:
            raise NotFoundError("there is no such run in this folder")
        return found

    def _scan(self) -> dict[str, Path]:
        if _is_run(self.root):
            return {self.root.name: self.root}
        found: dict[str, Path] = {}
        level = [self.root]
        looked = 0
        for _ in range(DEEPEST):
            below: list[Path] = []
            for folder in level:
                looked += 1
                if looked > MOST_FOLDERS:
                    break
                for path in _list_folders(folder):
                    if _is_run(path):
                        found[path.relative_to(self.root).as_posix()] = path
                    else:
                        below.append(path)
            level = below
        return dict(sorted(found.items())[:MOST_RUNS])


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and any((path / name).exists() for name in ("ledger.db", "metrics.jsonl"))


def _list_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder. Links are not followed, and names that are no text are left out."""
    try:
        with os.scandir(folder) as entries:
            found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [folder / name for name in sorted(found) if name.isprintable() and not name.startswith(".")]
