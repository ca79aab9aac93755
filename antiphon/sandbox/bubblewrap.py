"""A box: a machine of its own, as far as those inside can tell, made by bubblewrap.

The box has every namespace of its own, a root of its own that cannot be written, no capabilities, no network, and a uid that is
root neither inside nor outside. What can be written lies in memory and is bounded: the work directory `/box`, `/tmp` and
`/dev/shm`. The machine outside never opens a path of the box; it takes in bytes, through pipes that it made itself. When
the first process of the box ends, all others do, and with the last one all that they wrote. Landlock is not used: the root
holds nothing of this machine that it could keep from those inside.

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
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from antiphon.errors import SandboxError, UnsupportedError
from antiphon.sandbox import cgroups, seccomp
from antiphon.sandbox.base import Level, Limits
from antiphon.sandbox.cgroups import Group
from antiphon.sandbox.egress import FORWARDER, PORT, Egress
from antiphon.sandbox.processes import Processes
from antiphon.waits import Waits, succeed

T = TypeVar("T")

WORK = "/box"
CONTROL = "/run/antiphon"  # where a box sees the pipes that its controller made
USER = 1000  # inside
NOBODY = 65534  # outside, where the controller is root
RESERVED = 16  # processes that only the keeper may add, so that a session can be started in a box that is full of them
MOST_TRIES, TRY_SECONDS = 50, 0.02  # to remove a group whose processes were killed a moment ago
START_SECONDS = 60.0  # for a shell that starts in milliseconds, on a machine that may be loaded
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORK, "USER": "box", "LANG": "C.UTF-8", "TERM": "dumb"}

_GROUP = "cgroup"  # the file that says which control group goes with a directory
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
{before}
while :; do
    IFS= read -r name || exit
    (
        (
            ulimit -u {processes}
            exec setsid bash --norc --noprofile --noediting -i 9>&-
        ) < {control}/$name.lines > /dev/null 2>&1
        echo "gone $?" >&9
    ) 9> {control}/$name.reports < /dev/null &
done < {control}/keeper
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxConfig:
    """What a box is given."""

    limits: Limits = field(
        default_factory=lambda: Limits(
            seconds=60, cpu_seconds=3600, memory=2 << 30, file_size=512 << 20, disk=512 << 20, processes=256
        )
    )
    """`seconds` and `output` are of one command, `cpu_seconds` and `file_size` of one process, the others of the box. `disk` is
    the size of the work directory, of /tmp and of /dev/shm, each; they lie in memory, and count as memory of the box."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """More of this machine that can be read in the box: path there -> path here."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables, or other values of those that every box has."""
    network: tuple[str, ...] = ()
    """What can be reached from the box, by HTTP and HTTPS through a proxy, each as `host:port`; nothing else can."""


class Rooms:
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
        for name, content in _FILES.items():
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


class Box:
    """One box. Use as `async with await Box.start(...)`; leaving it leaves nothing behind."""

    level = Level.ISOLATED

    def __init__(self, rooms: Rooms, config: BoxConfig, waits: Waits) -> None:
        """See `start`."""
        self._egress = Egress(config.network)
        self.config = config
        self.waits = waits
        self.ended = asyncio.get_running_loop().create_future()
        self.room, self._group = rooms.make(config.limits.memory)
        self._rooms = rooms
        self._process: subprocess.Popen[bytes] | None = None
        self._names = itertools.count(1)
        self._keeper = self._first = -1  # descriptors: of the pipe to the keeper, and of the keeper itself

    @classmethod
    async def start(cls, rooms: Rooms, config: BoxConfig, waits: Waits) -> Self:
        """A new box. `UnsupportedError` where there is no bubblewrap, `SandboxError` if it fails."""
        box = cls(rooms, config, waits)
        told, tell = os.pipe()
        held, release = os.pipe()
        try:
            if config.network:
                await box._egress.start(box.room / "proxy")
            box._spawn(tell, held)
            os.close(tell)
            tell = -1
            box._begin(await box.wait(asyncio.to_thread(_read_all, told), "start"))
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
        elif self._process is not None and not self.ended.done():
            self._process.kill()
        if self._process is not None:
            await self.wait(asyncio.shield(self.ended), "end")
        await self._egress.close()
        for descriptor in (self._keeper, self._first):
            if descriptor >= 0:
                os.close(descriptor)
        self._keeper = self._first = -1
        if self.room.exists():
            self._rooms.remove(self.room, self._group)
            self._group = None

    def memory_kills(self) -> int:
        """How many processes were killed so far because the memory of the box was used up, as far as that is counted."""
        return 0 if self._group is None else self._group.kills()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _spawn(self, tell: int, held: int) -> None:
        """Start bubblewrap. It tells of process 1 in `tell`, and that one waits until something can be read from `held`."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise UnsupportedError("shell sandboxes need bwrap, and there is none here: install the package bubblewrap")
        os.mkfifo(self.room / "keeper")
        (self.room / "keeper").chmod(0o644)
        if self.config.network and shutil.which("python3", path=ENVIRONMENT["PATH"]) is None:
            raise UnsupportedError("a box with a network needs the python3 of the system, and there is none here")
        user = NOBODY if os.geteuid() == 0 else None
        keeper = _keeper(self.config, each=self._group is None)
        with (self.room / "errors").open("wb") as errors, tempfile.TemporaryFile() as calls:
            calls.write(seccomp.filter_program(sockets=True))
            calls.seek(0)
            arguments = [*_arguments(self.config, self.room), "--info-fd", str(tell), "--block-fd", str(held)]
            self._process = subprocess.Popen(
                [bwrap, *arguments, "--seccomp", str(calls.fileno()), "/bin/bash", "-c", keeper],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[tell, held, calls.fileno()],
                cwd="/",
                env={},
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        held_process = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(held_process, self._end, held_process)

    def _begin(self, answer: bytes) -> None:
        """Take note of process 1, which waits until it is let go on."""
        if not answer:
            said = (self.room / "errors").read_text(encoding="utf-8", errors="replace").strip()
            raise SandboxError(f"bubblewrap made no box: {said or 'it said nothing'}")
        first = json.loads(answer)["child-pid"]
        self._first = os.pidfd_open(first)
        if self._group is not None:
            self._group.take(first)
        self.processes = Processes(first)
        self._keeper = os.open(self.room / "keeper", os.O_RDWR | os.O_NONBLOCK)

    def _end(self, held_process: int) -> None:
        asyncio.get_running_loop().remove_reader(held_process)
        os.close(held_process)
        assert self._process is not None
        self._process.wait()
        succeed(self.ended, None)


def _read_all(descriptor: int) -> bytes:
    return b"".join(iter(lambda: os.read(descriptor, 4096), b""))


def _arguments(config: BoxConfig, room: Path) -> list[str]:
    """What bubblewrap is told of namespaces and mounts."""
    told = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1"]
    told += ["--uid", str(USER), "--gid", str(USER), "--hostname", "box", "--cap-drop", "ALL", "--clearenv"]
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), f"http://127.0.0.1:{PORT}") if config.network else {}
    for name, value in {**ENVIRONMENT, **proxy, **config.environment}.items():
        told += ["--setenv", name, value]
    for path in _SYSTEM:
        told += ["--ro-bind-try", path, path]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        told += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    for name in _FILES:
        told += ["--ro-bind", str(room.parent / name), f"/etc/{name}"]
    for inside, here in config.mounts.items():
        told += ["--ro-bind", str(here), inside]
    told += ["--proc", "/proc", "--dev", "/dev"]
    for path, mode in (("/dev/shm", "1777"), ("/tmp", "1777"), (WORK, "0755")):
        told += ["--perms", mode, "--size", str(config.limits.disk), "--tmpfs", path]
    told += ["--ro-bind", str(room), CONTROL, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
    return told


def _keeper(config: BoxConfig, *, each: bool) -> str:
    """The program of process 1. It sets the limits for itself and so for all others, because only inside does the kernel count
    the processes of this box alone. `each`: whether memory is bounded for each process, not for all together."""
    limits = config.limits
    values = {
        "c": 0,
        "f": -(-limits.file_size // 1024),
        "t": math.ceil(limits.cpu_seconds),
        "u": limits.processes + RESERVED,
    }
    if each:
        values["v"] = -(-limits.memory // 1024)
    lines = "\n".join(f"ulimit -{name} {value}" for name, value in values.items())
    if config.network:
        lines += f"\npython3 -I -S -c {shlex.quote(FORWARDER.format(port=PORT, path=f'{CONTROL}/proxy'))}"
    return _KEEPER.format(before=lines, control=CONTROL, processes=limits.processes)
