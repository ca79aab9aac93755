"""Directories in shared memory that are removed even if the process that made them was killed."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from antiphon.core.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
LOCK = ".antiphon-lock"  # a file in each shared directory; the process that made the directory holds a lock on it


@contextmanager
def shared_directory(name: str, parent: str = "", *, key: str = "weights.directory") -> Iterator[Path]:
    """Make a directory for the duration of the context, and remove directories that killed processes left behind.

    Args:
        name: Part of the name of the directory.
        parent: Where to make it; by default in shared memory, or in the temporary folder if the platform has none.
        key: Configuration key of `parent`, for the error.

    Raises:
        ConfigError: If the directory cannot be made.
    """
    remove_abandoned_directories(parent)
    try:
        path, lock = _make_locked(name, parent)
    except OSError as error:
        message = f"cannot write to {str(_parent_directory(parent))!r}: {error.strerror}"
        raise ConfigError(message, key=key, value=parent) from error
    try:
        yield path
    finally:
        shutil.rmtree(path)
        os.close(lock)


def remove_abandoned_directories(parent: str = "") -> list[Path]:
    """Remove this user's shared directories whose process has ended, and return their paths.

    The kernel releases the lock of a process however it ends.
    """
    removed = []
    for lock in _parent_directory(parent).glob(f"antiphon-*/{LOCK}"):
        with suppress(OSError):  # a living process holds the lock, or it belongs to another user, or is being removed
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(lock)
                    removed.append(lock.parent)
            finally:
                os.close(descriptor)
    return removed


def _remove(lock: Path) -> None:
    """Remove a shared directory, its lock last: a directory without a lock would never be removed."""
    for path in lock.parent.iterdir():
        if path != lock:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(lock.parent)


def _make_locked(name: str, parent: str) -> tuple[Path, int]:
    """Make a directory and lock it; retry if another process removed it as abandoned before the lock was held."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"antiphon-{name}-", dir=_parent_directory(parent)))
        with suppress(FileNotFoundError):
            descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            except OSError:  # this file system has no locks, so no process removes the directory as abandoned either
                pass
            if (path / LOCK).exists() and os.path.samestat(os.fstat(descriptor), (path / LOCK).stat()):
                return path, descriptor
            os.close(descriptor)


def _parent_directory(parent: str) -> Path:
    return Path(parent or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else tempfile.gettempdir()))
