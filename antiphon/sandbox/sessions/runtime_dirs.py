"""Where the pipes of boxes lie on this machine, and the control groups that bound their memory."""

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

MOST_TRIES, TRY_SECONDS = 50, 0.02  # to remove a group whose processes were killed a moment ago

FILES = {
    "passwd": f"box:x:{USER}:{USER}::{WORK}:/bin/bash\n",
    "group": f"box:x:{USER}:\n",
    "hosts": "127.0.0.1 localhost box\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}  # in the /etc of a box that bubblewrap made

_GROUP = "cgroup"  # the file that says which control group goes with a directory


class RuntimeDirs:
    """The directory of this process that holds the pipes of its boxes; those that dead processes left are removed.

    A process locks its own, and the kernel undoes the lock when the process ends, however it ends.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """`parent` can be passed through by every user; the default is the system's directory for temporary files."""
        base = (parent or Path(tempfile.gettempdir())) / f"antiphon-boxes-{os.getuid()}"
        base.mkdir(mode=0o711, exist_ok=True)
        if base.lstat().st_uid != os.getuid():
            raise SandboxError(f"{base} belongs to another user: no box can be made there")
        self._count = itertools.count()
        with _locked(base):  # who has made a directory has locked it before anyone else looks
            _sweep(base)
            self.path = Path(tempfile.mkdtemp(dir=base, prefix="antiphon-"))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path.chmod(0o711)
        for name, content in FILES.items():
            (self.path / name).write_text(content, encoding="ascii")
            (self.path / name).chmod(0o644)
        self._group: Group | None = None
        with suppress(OSError):  # then each process has its own limit
            self._group, path = cgroups.make_group(self.path.name)
            (self.path / _GROUP).write_text(str(path), encoding="utf-8")

    def make(self, memory: int) -> tuple[Path, Group | None]:
        """A new directory, which nobody but this process can list or write to, and a group for so much memory."""
        room = self.path / str(next(self._count))
        room.mkdir()
        room.chmod(0o711)
        group = self._group and self._group.child(room.name)
        if group is not None:
            group.limit_memory(memory)
        return room, group

    def remove(self, room: Path, group: Group | None) -> None:
        """Remove what `make` made, when nothing runs in it any more."""
        shutil.rmtree(room, ignore_errors=True)
        if group is not None:
            os.close(group.directory)
            group.remove()

    def close(self) -> None:
        """Remove all."""
        if self._group is not None:
            os.close(self._group.directory)
            os.close(self._group.above)
        _clear(self.path)
        os.close(self._lock)


@contextmanager
def _locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """`BlockingIOError` if another holds the lock, and nobody is to wait for it."""
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
    """Remove a directory and its group; both stay, for the next sweep, where processes take long to end in the group."""
    with suppress(OSError):
        group = Path((path / _GROUP).read_text(encoding="utf-8"))
        for _ in range(MOST_TRIES):
            cgroups.remove_group(group)
            if not group.exists():
                break
            time.sleep(TRY_SECONDS)
        else:
            return
    shutil.rmtree(path, ignore_errors=True)
