"""Directories for the pipes of shell sandboxes, and control groups that bound the sandboxes' memory."""

import fcntl
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from antiphon.core.errors import SandboxError
from antiphon.sandbox.isolation import cgroups
from antiphon.sandbox.isolation.cgroups import Group
from antiphon.sandbox.sessions.config import USER, WORK

MAX_TRIES, TRY_SECONDS = 50, 0.02  # for removing a group whose processes were killed a moment ago

FILES = {
    "passwd": f"box:x:{USER}:{USER}::{WORK}:/bin/bash\n",
    "group": f"box:x:{USER}:\n",
    "hosts": "127.0.0.1 localhost box\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}  # files in the /etc of a bubblewrap sandbox

_GROUP = "cgroup"  # file with the path of a directory's control group


class RuntimeDirs:
    """The directory of this process that holds the pipes of its sandboxes.

    Opening one removes the directories that dead processes left. Each process locks its own, and the kernel releases the lock
    when the process ends for any reason.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Create the directory.

        Args:
            parent: A directory that every user can pass through; by default that for temporary files.
        """
        base = (parent or Path(tempfile.gettempdir())) / f"antiphon-boxes-{os.getuid()}"
        base.mkdir(mode=0o711, exist_ok=True)
        if base.lstat().st_uid != os.getuid():
            raise SandboxError(f"{base} belongs to another user, so no sandbox can be made there")
        self._count = itertools.count()
        with _locked(base):  # so that a new directory is locked before another process looks at it
            _sweep(base)
            self.path = Path(tempfile.mkdtemp(dir=base, prefix="antiphon-"))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path.chmod(0o711)
        for name, content in FILES.items():
            (self.path / name).write_text(content, encoding="ascii")
            (self.path / name).chmod(0o644)
        self._group: Group | None = None
        with suppress(OSError):  # without control groups, memory is bounded per process
            self._group, path = cgroups.make_group(self.path.name)
            (self.path / _GROUP).write_text(str(path), encoding="utf-8")

    def make(self, memory: int) -> tuple[Path, Group | None]:
        """Make the directory of one sandbox, and its control group if there is one.

        Only this process can list the directory or write to it.

        Args:
            memory: Bytes that the group allows.
        """
        directory = self.path / str(next(self._count))
        directory.mkdir()
        directory.chmod(0o711)
        group = self._group and self._group.child(directory.name)
        if group is not None:
            group.limit_memory(memory)
        return directory, group

    def remove(self, directory: Path, group: Group | None) -> None:
        """Remove the directory and group of a sandbox that has ended."""
        shutil.rmtree(directory, ignore_errors=True)
        if group is not None:
            os.close(group.directory)
            group.remove()

    def close(self) -> None:
        """Remove the directory and the groups."""
        if self._group is not None:
            os.close(self._group.directory)
            os.close(self._group.above)
        _clear(self.path)
        os.close(self._lock)


@contextmanager
def _locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a directory; raise `BlockingIOError` if another process has it and `wait` is False."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def _sweep(base: Path) -> None:
    for left in base.iterdir():
        with suppress(OSError), _locked(left, wait=False):
            _clear(left)


def _clear(path: Path) -> None:
    """Remove a directory and its group. If processes in the group end too slowly, both stay for the next sweep."""
    with suppress(OSError):
        group = Path((path / _GROUP).read_text(encoding="utf-8"))
        for _ in range(MAX_TRIES):
            cgroups.remove_group(group)
            if not group.exists():
                break
            time.sleep(TRY_SECONDS)
        else:
            return
    shutil.rmtree(path, ignore_errors=True)
