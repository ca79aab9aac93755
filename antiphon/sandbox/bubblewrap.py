"""A box: a machine of its own, as far as those inside can tell, made by bubblewrap.

The box has every namespace of its own, a root of its own that cannot be written, no capabilities, no network, and a uid that is
root neither inside nor outside. What can be written lies in memory and is bounded: the work directory `/box`, `/tmp` and
`/dev/shm`. The machine outside never opens a path of the box; it takes in bytes, through pipes that it made itself. When
the first process of the box ends, all others do, and with the last one all that they wrote.

    controller -- bwrap -- keeper (process 1) -- one parent a session -- bash (session.py)

The keeper cannot be signalled from inside. It starts a session when it is told to, through a pipe; the parent of a session
says how its shell ended. The box is the wall: those inside share a uid and can disturb one another, but not get out.
"""

import asyncio
import fcntl
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from antiphon.errors import SandboxError, UnsupportedError
from antiphon.sandbox.base import Level, Limits
from antiphon.sandbox.processes import Processes
from antiphon.waits import Waits, succeed

T = TypeVar("T")

WORK = "/box"
CONTROL = "/run/antiphon"  # where a box sees the pipes that its controller made
USER = 1000  # inside
NOBODY = 65534  # outside, where the controller is root
START_SECONDS = 60.0  # for a shell that starts in milliseconds, on a machine that may be loaded
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORK, "USER": "box", "LANG": "C.UTF-8", "TERM": "dumb"}

_SYSTEM = (
    "/usr",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/ssl/certs",
)
_FILES = {
    "passwd": f"box:x:{USER}:{USER}::{WORK}:/bin/bash\n",
    "group": f"box:x:{USER}:\n",
    "hosts": "127.0.0.1 localhost box\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}

# Process 1. Each line it reads names a session. The parent of a session keeps the reports open, so their end is its end.
_KEEPER = r"""
set -m
trap : HUP INT QUIT TERM ALRM USR1 USR2
{limits}
while :; do
    IFS= read -r name || continue
    (
        setsid bash --norc --noprofile --noediting -i 9>&- < {control}/$name.lines > /dev/null 2>&1
        echo "gone $?" >&9
    ) 9> {control}/$name.reports < /dev/null &
done < {control}/keeper
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxConfig:
    """What a box is given."""

    limits: Limits = field(
        default_factory=lambda: Limits(seconds=60, cpu_seconds=3600, memory=2 << 30, file_size=1 << 30, processes=256)
    )
    """`seconds` and `output` are of one command, `cpu_seconds` and `file_size` of one process, the others of the box."""
    space: int = 512 << 20
    """Bytes of the work directory, and as many of /tmp; they lie in memory and count as memory of the box."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """More of this machine that can be read in the box: path there -> path here."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables, or other values of those that every box has."""


class Rooms:
    """The directory of this process that holds the pipes of its boxes; those that dead processes left are removed.

    A process locks its own, and the kernel undoes the lock when the process ends, however it ends.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """`parent` can be passed through by every user; the default is the system's directory for temporary files."""
        base = (parent or Path(tempfile.gettempdir())) / f"antiphon-boxes-{os.getuid()}"
        base.mkdir(mode=0o711, exist_ok=True)
        if base.stat().st_uid != os.getuid():
            raise SandboxError(f"{base} belongs to another user: no box can be made there")
        self._count = itertools.count()
        self._lock = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # while others may look
        try:
            _sweep(base)
            self.path = Path(tempfile.mkdtemp(dir=base))
            own = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(self._lock)
        self._lock = own
        self.path.chmod(0o711)
        for name, content in _FILES.items():
            (self.path / name).write_text(content, encoding="ascii")
            (self.path / name).chmod(0o644)

    def make(self) -> Path:
        """A new directory, which nobody but this process can list or write to."""
        room = self.path / str(next(self._count))
        room.mkdir()
        room.chmod(0o711)
        return room

    def close(self) -> None:
        """Remove all."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(base: Path) -> None:
    for left in base.iterdir():
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)


class Box:
    """One box. Use as `async with await Box.start(...)`; leaving it leaves nothing behind."""

    level = Level.ISOLATED

    def __init__(self, process: "subprocess.Popen[bytes]", room: Path, config: BoxConfig, waits: Waits) -> None:
        """See `start`."""
        loop = asyncio.get_running_loop()
        self.config = config
        self.room = room
        self.waits = waits
        self.ended = loop.create_future()
        self._process = process
        self._names = itertools.count(1)
        self._keeper = self._first = -1  # descriptors: of the pipe to the keeper, and of the keeper itself
        self._watched = os.pidfd_open(process.pid)
        loop.add_reader(self._watched, self._end)

    @classmethod
    async def start(cls, rooms: Rooms, config: BoxConfig, waits: Waits) -> Self:
        """A new box. `UnsupportedError` where there is no bubblewrap, `SandboxError` if it fails."""
        room = rooms.make()
        os.mkfifo(room / "keeper")
        (room / "keeper").chmod(0o644)
        told, tell = os.pipe()
        held, release = os.pipe()
        try:
            box = cls(_spawn(config, room, tell, held), room, config, waits)
            os.close(tell)
            tell = -1
            try:
                answer = await box.wait(asyncio.to_thread(_read_all, told), "start")
                box._begin(answer)
                os.write(release, b"\n")
            except BaseException:
                await box.close()
                raise
        finally:
            for descriptor in (told, tell, held, release):
                if descriptor >= 0:
                    os.close(descriptor)
        return box

    async def wait(self, awaitable: Awaitable[T], name: str, seconds: float = START_SECONDS) -> T:
        """Wait for something that the box is to do; `StallError` if it has not done it in time."""
        box = f"box {self.room.name}"
        return await self.waits.wait(awaitable, name=name, owner="the sandbox", on=box, deadline=seconds)

    def new_name(self) -> str:
        """A name that nothing in the box has."""
        return str(next(self._names))

    def start_session(self, name: str) -> None:
        """Have the keeper start a shell; it reads `<name>.lines`, and `<name>.reports` tells what becomes of it."""
        if self.ended.done():
            raise SandboxError(f"box {self.room.name} has ended")
        os.write(self._keeper, f"{name}\n".encode())

    async def close(self) -> None:
        """End all that runs in the box, and remove what it left. May be called twice."""
        if self._first >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        elif not self.ended.done():
            self._process.kill()
        await self.wait(asyncio.shield(self.ended), "end")
        for descriptor in (self._keeper, self._first):
            if descriptor >= 0:
                os.close(descriptor)
        self._keeper = self._first = -1
        shutil.rmtree(self.room, ignore_errors=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _begin(self, answer: bytes) -> None:
        """Take note of process 1, which waits until it is let go on."""
        if not answer:
            said = (self.room / "errors").read_text(encoding="utf-8", errors="replace").strip()
            raise SandboxError(f"bubblewrap made no box: {said or 'it said nothing'}")
        first = json.loads(answer)["child-pid"]
        self._first = os.pidfd_open(first)
        self.processes = Processes(first)
        self._keeper = os.open(self.room / "keeper", os.O_RDWR | os.O_NONBLOCK)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watched)
        os.close(self._watched)
        self._process.wait()
        succeed(self.ended, None)


def _read_all(descriptor: int) -> bytes:
    return b"".join(iter(lambda: os.read(descriptor, 4096), b""))


def _spawn(config: BoxConfig, room: Path, tell: int, held: int) -> "subprocess.Popen[bytes]":
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UnsupportedError(
            "shell sandboxes need bubblewrap, and there is no bwrap here: install the package bubblewrap"
        )
    root = os.geteuid() == 0
    outside = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if root else {}
    keeper = _KEEPER.format(limits=_limits(config.limits), control=CONTROL)
    descriptors = ["--info-fd", str(tell), "--block-fd", str(held)]
    with (room / "errors").open("wb") as errors:
        return subprocess.Popen(
            [bwrap, *_arguments(config, room), *descriptors, "/bin/bash", "-c", keeper],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[tell, held],
            cwd="/",
            env={},
            **outside,
        )


def _arguments(config: BoxConfig, room: Path) -> list[str]:
    """What bubblewrap is told of namespaces and mounts."""
    yes = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1"]
    yes += ["--uid", str(USER), "--gid", str(USER), "--hostname", "box", "--cap-drop", "ALL", "--clearenv"]
    for name, value in {**ENVIRONMENT, **config.environment}.items():
        yes += ["--setenv", name, value]
    for path in _SYSTEM:
        yes += ["--ro-bind-try", path, path]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        yes += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    for name in _FILES:
        yes += ["--ro-bind", str(room.parent / name), f"/etc/{name}"]
    for inside, here in config.mounts.items():
        yes += ["--ro-bind", str(here), inside]
    yes += ["--proc", "/proc", "--dev", "/dev"]
    for path, mode in (("/dev/shm", "1777"), ("/tmp", "1777"), (WORK, "0755")):
        yes += ["--perms", mode, "--size", str(config.space), "--tmpfs", path]
    yes += ["--ro-bind", str(room), CONTROL, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
    return yes


def _limits(limits: Limits) -> str:
    """What the keeper sets for itself, and so for all others: only inside does the kernel count this box's processes."""
    values = {
        "c": 0,
        "f": -(-limits.file_size // 1024),
        "t": math.ceil(limits.cpu_seconds),
        "u": limits.processes,
        "v": -(-limits.memory // 1024),
    }
    return "\n".join(f"ulimit -{name} {value}" for name, value in values.items())
