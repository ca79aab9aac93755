"""The start of a run in its directory, which is as it was before if the start is refused.

A run that is overwritten is moved into `.replaced` in its directory, and deleted once the new run has begun. A start that is
refused removes what it wrote, and moves the earlier run back. After a start that was killed, or that ended for another reason
and left logs worth reading, the next start with `overwrite` or `resume` moves it back first.

The directory is locked from the start of a run to its end, whatever kind of run it is.
"""

import asyncio
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from antiphon.core.errors import AntiphonError, ConfigError, RecordError, StallError, WorkerDiedError
from antiphon.record.run_dir import RunDirectory, atomic_write
from antiphon.record.store import require_no_writer

REPLACED = ".replaced"  # holds the whole earlier run; everything beside it is of the new one
MOVING = (
    ".replaced.part"  # holds the part of the earlier run that is being moved; everything beside it is of the same run
)
DELETED = ".deleted"  # holds an earlier run that is being deleted
UNDONE = (AntiphonError, asyncio.CancelledError, KeyboardInterrupt)
KEPT = (WorkerDiedError, StallError)  # their messages refer to logs


class RunStart:
    """The directory of a run that starts. Use it as a context manager around the whole run."""

    def __init__(self, root: str | Path, name: str, *, overwrite: bool = False, resume: bool = False) -> None:
        """Prepare the start of the run `name` in the folder `root`; nothing is written yet.

        Args:
            root: Folder of all runs.
            name: Name of the run.
            overwrite: Replace the run of this name, if there is one.
            resume: Continue the run of this name.
        """
        self._root, self._name, self._overwrite, self._resume = root, name, overwrite, resume
        self._config = b""  # of the run that is resumed
        self._has_begun = False
        self._lock: int | None = None  # descriptor of the directory
        self.directory = RunDirectory(Path(root, name))

    def __enter__(self) -> "RunStart":
        """Create the directory, or check that there is a run to resume.

        Raises:
            ConfigError: There is a run that is not to be overwritten, or none to resume.
            RecordError: Another process writes to the run.
        """
        path = self.directory.path
        is_new = not (path.exists() or self._resume)
        if is_new:
            path.mkdir(parents=True)
        self._lock = _lock_directory(path)
        try:
            self._prepare(path)
        except BaseException:
            self._release()
            with suppress(OSError):
                if is_new:
                    path.rmdir()
            raise
        return self

    def _prepare(self, path: Path) -> None:
        if self._overwrite or self._resume:
            require_no_writer(path)
            if (path / DELETED).is_dir():
                shutil.rmtree(path / DELETED)
            _restore(path)
        if self._resume:
            self.directory = RunDirectory.resume(self._root, self._name)
            self._config = self.directory.config.read_bytes()
            return
        if self._overwrite and path.is_dir() and any(path.iterdir()):
            _set_aside(self.directory)
        self.directory = RunDirectory.create(self._root, self._name, is_replacing=(path / REPLACED).is_dir())

    def confirm(self) -> None:
        """Delete what the run replaces, which has begun: errors leave it as it is from now on."""
        self._has_begun = True
        self.directory.summary.unlink(missing_ok=True)  # of a run that is resumed: its end is undone
        path = self.directory.path
        if (path / REPLACED).is_dir():
            (path / REPLACED).rename(path / DELETED)  # what is partly deleted must not come back
            shutil.rmtree(path / DELETED)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not (self._has_begun or not isinstance(error, UNDONE) or isinstance(error, KEPT)):
                self._undo()
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _undo(self) -> None:
        """Leave the directory as it was before the start."""
        if self._resume:
            with atomic_write(self.directory.config) as file:
                file.write(self._config)
            return
        path = self.directory.path
        if not _restore(path):
            _clear(path)
            with suppress(OSError):  # such as the mount point of a volume
                path.rmdir()


def _lock_directory(path: Path) -> int | None:
    """Return a descriptor that locks a directory until it is closed; None if there is no directory.

    Raises:
        RecordError: Another process holds the lock.
    """
    while path.is_dir():
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise RecordError(f"another process writes to the run {path}; wait for it, or end it", path=path) from error
        except (
            OSError
        ):  # a file system whose directories cannot be locked, such as NFS: the ledger has a lock of its own
            return lock
        if path.is_dir() and path.stat().st_ino == os.fstat(lock).st_ino:
            return lock
        os.close(lock)  # a start that was refused has removed the directory meanwhile
    return None


def _set_aside(directory: RunDirectory) -> None:
    """Move the run that is in a directory into `REPLACED`; `ConfigError` if it holds files that no run wrote."""
    path = directory.path
    if not directory.config.is_file():
        if any(not found.is_dir() for found in path.rglob("*")):
            raise ConfigError("holds files, but no run (no config.yaml); it is not overwritten", path=str(path))
        return
    part = path / MOVING
    part.mkdir()
    _move(path, part)
    part.rename(path / REPLACED)


def _restore(path: Path) -> bool:
    """Move an earlier run that was set aside back, in place of what is there; return False if there is none."""
    if (path / REPLACED).is_dir():
        _clear(path, but=REPLACED)
        (path / REPLACED).rename(path / MOVING)
    part = path / MOVING
    if not part.is_dir():
        return False
    _move(part, path)
    part.rmdir()
    return True


def _move(source: Path, target: Path) -> None:
    for entry in _list_config_last(source):
        if entry.name != MOVING:
            entry.rename(target / entry.name)


def _clear(path: Path, but: str = "") -> None:
    for entry in _list_config_last(path):
        if entry.name == but:
            continue
        remove: Callable[[Path], None] = shutil.rmtree if entry.is_dir() and not entry.is_symlink() else Path.unlink
        remove(entry)


def _list_config_last(path: Path) -> list[Path]:
    """Return the entries of a directory; config.yaml marks it as a run's, should moving or removing be interrupted."""
    return sorted(path.iterdir(), key=lambda entry: entry.name == "config.yaml")
