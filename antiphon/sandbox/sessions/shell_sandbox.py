"""A box: a machine of its own, as far as those inside can tell, made by bubblewrap or docker.

The box has every namespace of its own, a root of its own that cannot be written, no capabilities, no network, and a uid that is
root neither inside nor outside. What can be written lies in memory and is bounded: the work directory `/box`, `/tmp` and
`/dev/shm`. The machine outside never opens a path of the box; it takes in bytes, through pipes that it made itself. When
the first process of the box ends, all others do, and with the last one all that they wrote. In boxes of bubblewrap Landlock
says once more what can be written; containers have none, for it is not docker's to give.

    controller -- bwrap or docker -- keeper (process 1) -- one parent a session -- bash (session.py)

The keeper cannot be signalled from inside. It starts a session when it is told to, through a pipe; the parent of a session
says how its shell ended. The box is the wall: those inside share a uid and can disturb one another, but not get out.
"""

import asyncio
import itertools
import math
import os
import shlex
import signal
from collections.abc import Awaitable
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

from antiphon.core.deadlines import Deadlines, succeed
from antiphon.core.errors import SandboxError
from antiphon.sandbox.base import Level
from antiphon.sandbox.sessions import bubblewrap, docker
from antiphon.sandbox.sessions.config import CONTROL, RESERVED, Launched, ShellSandboxConfig
from antiphon.sandbox.sessions.egress import FORWARDER, PORT, Egress
from antiphon.sandbox.sessions.processes import Processes
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs

T = TypeVar("T")

ROUND_SECONDS, MOST_ROUNDS = (0.005, 0.1), 20  # between two rounds of kills: at first, and at most; and how many
START_SECONDS = 60.0  # for a shell that starts in milliseconds, on a machine that may be loaded

# Process 1. Each line it reads names a session. The parent of a session keeps the reports open, so their end is its end; it
# reports its number first, so that it can be killed if a program has stopped it.
_KEEPER = r"""
set -m
trap : HUP INT QUIT TERM ALRM USR1 USR2
{before}
while :; do
    IFS= read -r name || exit
    (
        echo "parent $BASHPID" >&9
        (
            ulimit -u {processes}
            exec setsid bash --norc --noprofile --noediting -i 9>&-
        ) < {control}/$name.lines > /dev/null 2>&1
        echo "gone $?" >&9
    ) 9> {control}/$name.reports < /dev/null &
done < {control}/keeper
"""


class ShellSandbox:
    """One box. Use as `async with await Box.start(...)`; leaving it leaves nothing behind."""

    level = Level.ISOLATED

    def __init__(self, rooms: RuntimeDirs, config: ShellSandboxConfig, deadlines: Deadlines) -> None:
        """See `start`."""
        self._egress = Egress(config.network)
        self.config = config
        self.deadlines = deadlines
        self.ended = asyncio.get_running_loop().create_future()
        self.room, self._group = rooms.make(config.limits.memory)
        self._rooms = rooms
        self._launched: Launched | None = None
        self._names = itertools.count(1)
        self._keeper = self._first = -1  # descriptors: of the pipe to the keeper, and of the keeper itself

    @classmethod
    async def start(cls, rooms: RuntimeDirs, config: ShellSandboxConfig, deadlines: Deadlines) -> Self:
        """A new box. `UnsupportedError` where there is no bubblewrap or docker, `SandboxError` if it fails."""
        box = cls(rooms, config, deadlines)
        try:
            if config.network:
                await box._egress.start(box.room / "proxy")
            os.mkfifo(box.room / "keeper")
            (box.room / "keeper").chmod(0o644)
            launch = docker.launch if config.image else bubblewrap.launch
            keeper = _keeper(config, each=not config.image and box._group is None)
            box._begin(await box.wait(launch(config, box.room, keeper), "start"))
        except BaseException:
            await box.close()
            raise
        return box

    async def wait(self, awaitable: Awaitable[T], name: str, seconds: float = START_SECONDS) -> T:
        """Wait for something that the box is to do; `StallError` if it has not done it in time."""
        box = f"box {self.room.name}"
        return await self.deadlines.wait(awaitable, name=name, owner="the sandbox", on=box, deadline=seconds)

    def new_name(self) -> str:
        """A name that nothing in the box has."""
        return str(next(self._names))

    def start_session(self, name: str) -> None:
        """Have the keeper start a shell; it reads `<name>.lines`, and `<name>.reports` tells what becomes of it."""
        if self.ended.done():
            raise SandboxError(f"box {self.room.name} has ended")
        os.write(self._keeper, f"{name}\n".encode())

    async def end_processes(self) -> None:
        """End all that runs in the box but the keeper, which can start sessions afterwards."""
        pause, most = ROUND_SECONDS
        for _ in range(MOST_ROUNDS):  # what starts processes all the time is not ended at once
            self.processes.signal(signal.SIGKILL, lambda process: True)
            if self.ended.done() or not self.processes.all():
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    async def close(self) -> None:
        """End all that runs in the box, and remove what it left. May be called twice."""
        if self._first >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            await self.wait(asyncio.shield(self.ended), "end")
        if self._launched is not None:
            await self.wait(asyncio.to_thread(self._launched.process.wait), "end")
        await self._egress.close()
        if self._keeper >= 0:
            os.close(self._keeper)
            self._keeper = -1
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

    def _begin(self, launched: Launched) -> None:
        """Take note of process 1, and let it go on."""
        self._launched = launched
        try:
            self._first = os.pidfd_open(launched.first)
            asyncio.get_running_loop().add_reader(self._first, self._end)
            if self._group is not None:
                with suppress(PermissionError):  # docker's, which has bounded its memory itself
                    self._group.add_process(launched.first)
            self.processes = Processes(launched.first)
            self._keeper = os.open(self.room / "keeper", os.O_RDWR | os.O_NONBLOCK)
        finally:
            if launched.held is not None:
                os.close(launched.held)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._first)
        os.close(self._first)
        self._first = -1
        succeed(self.ended, None)


def _keeper(config: ShellSandboxConfig, *, each: bool) -> str:
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
