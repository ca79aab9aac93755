"""A sandbox for shell sessions, made by bubblewrap or docker.

The sandbox has namespaces of its own of every kind, a read-only root, no capabilities, no network, and a user that is root
neither inside nor outside. What can be written lies in memory and is bounded: the work directory `/box`, `/tmp` and `/dev/shm`.
The machine outside never opens a path inside; it only reads bytes from pipes that it created. When the first process ends, all
others end, and everything that they wrote is gone. With bubblewrap, Landlock restricts writing as well; docker cannot apply it.

    controller -- bwrap or docker -- keeper (process 1) -- one parent per session -- bash (session.py)

Processes inside cannot signal the keeper. It starts a session on request, through a pipe, and the parent of a session reports
how its shell ended. Processes inside share a user and can disturb one another, but they cannot get out.
"""

import asyncio
import itertools
import math
import os
import secrets
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

ROUND_SECONDS, MAX_ROUNDS = (
    (0.005, 0.1),
    20,
)  # between two rounds of kills: first and longest pause; and the number of rounds
START_SECONDS = 60.0  # a shell starts in milliseconds, but the machine may be loaded

# The program of process 1. Each line that it reads names a session. The parent of a session keeps the reports open, so they end
# with it. It reports its process number first, so that it can be killed if a program has stopped it.
_KEEPER = r"""
set -m
trap : HUP INT QUIT TERM ALRM USR1 USR2
{before}
while :; do
    IFS= read -r name || exit
    (
        echo "parent $BASHPID" >&9
        (
            {bound}
            exec setsid bash --norc --noprofile --noediting -i 9>&-
        ) < {control}/$name.lines > /dev/null 2>&1
        echo "gone $?" >&9
    ) 9> {control}/$name.reports < /dev/null &
done < {control}/keeper
"""


class ShellSandbox:
    """One sandbox. Use it as `async with await ShellSandbox.start(...)`; leaving the block ends everything inside."""

    level = Level.ISOLATED

    def __init__(self, runtime_dirs: RuntimeDirs, config: ShellSandboxConfig, deadlines: Deadlines) -> None:
        """Create the sandbox's directory; `start` does the rest."""
        self._egress = Egress(config.network)
        self.config = config
        self.deadlines = deadlines
        self.ended = asyncio.get_running_loop().create_future()
        self.directory, self._group = runtime_dirs.make(config.limits.memory)
        self._runtime_dirs = runtime_dirs
        self._launched: Launched | None = None
        self._names = itertools.count(1)
        self._keeper = self._first = -1  # descriptors of the pipe to the keeper, and of the keeper's process

    @classmethod
    async def start(cls, runtime_dirs: RuntimeDirs, config: ShellSandboxConfig, deadlines: Deadlines) -> Self:
        """Start a sandbox.

        Args:
            runtime_dirs: Holds the sandbox's pipes and control group.
            config: Limits, mounts, network and image.
            deadlines: Times everything that the sandbox is asked to do.

        Raises:
            UnsupportedError: There is no bubblewrap or docker here.
            SandboxError: The start failed.
        """
        sandbox = cls(runtime_dirs, config, deadlines)
        try:
            if config.network:
                await sandbox._egress.start(sandbox.directory / "proxy")
            os.mkfifo(sandbox.directory / "keeper")
            (sandbox.directory / "keeper").chmod(0o644)
            launch = docker.launch if config.image else bubblewrap.launch
            keeper = _keeper_program(config, per_process=not config.image and sandbox._group is None)
            sandbox._attach(await sandbox.wait(launch(config, sandbox.directory, keeper), "start"))
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def wait(self, awaitable: Awaitable[T], name: str, seconds: float = START_SECONDS) -> T:
        """Wait for something that the sandbox is to do; raise `StallError` if it takes too long."""
        sandbox = f"sandbox {self.directory.name}"
        return await self.deadlines.wait(awaitable, name=name, owner="the sandbox", on=sandbox, deadline=seconds)

    def new_name(self) -> str:
        """Return a name that nothing in the sandbox has yet, and that no other user of the machine can guess."""
        return f"{next(self._names)}-{secrets.token_hex(8)}"

    def start_session(self, name: str) -> None:
        """Have the keeper start a shell that reads `<name>.lines`; its state is reported in `<name>.reports`."""
        if self.ended.done():
            raise SandboxError(f"sandbox {self.directory.name} has ended")
        os.write(self._keeper, f"{name}\n".encode())

    async def end_processes(self) -> None:
        """End everything in the sandbox but the keeper, which can start sessions afterwards."""
        pause, most = ROUND_SECONDS
        for _ in range(MAX_ROUNDS):  # a program that keeps starting processes does not end in one round
            self.processes.signal(signal.SIGKILL, lambda process: True)
            if self.ended.done() or not self.processes.all():
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    async def close(self) -> None:
        """End everything in the sandbox and remove its directory. A second call does nothing."""
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
        if self.directory.exists():
            self._runtime_dirs.remove(self.directory, self._group)
            self._group = None

    def memory_kills(self) -> int:
        """Return how many processes the kernel has killed for the sandbox's memory; 0 where it does not count them."""
        return 0 if self._group is None else self._group.kills()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _attach(self, launched: Launched) -> None:
        """Watch process 1, and let it continue."""
        self._launched = launched
        try:
            self._first = os.pidfd_open(launched.first)
            asyncio.get_running_loop().add_reader(self._first, self._on_end)
            if self._group is not None and not self.config.image_as_built:  # else docker bounds memory and processes
                with suppress(PermissionError):  # docker's process, whose memory docker has bounded
                    self._group.add_process(launched.first)
            self.processes = Processes(launched.first)
            self._keeper = os.open(self.directory / "keeper", os.O_RDWR | os.O_NONBLOCK)
        finally:
            if launched.held is not None:
                os.close(launched.held)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._first)
        os.close(self._first)
        self._first = -1
        succeed(self.ended, None)


def _keeper_program(config: ShellSandboxConfig, *, per_process: bool) -> str:
    """Return the bash program of process 1.

    It sets the limits for itself and thereby for all others, because only inside does the kernel count the processes of this
    sandbox alone.

    Args:
        config: The limits and the network.
        per_process: Bound memory for each process, because it cannot be bounded for all together.
    """
    limits = config.limits
    values = {
        "c": 0,
        "f": -(-limits.file_size // 1024),
        "t": math.ceil(limits.cpu_seconds),
    }
    if not config.image_as_built:
        values["u"] = limits.processes + RESERVED
    if per_process:
        values["v"] = -(-limits.memory // 1024)
    lines = "\n".join(f"ulimit -{name} {value}" for name, value in values.items())
    if config.network:
        lines += f"\npython3 -I -S -c {shlex.quote(FORWARDER.format(port=PORT, path=f'{CONTROL}/proxy'))}"
    bound = ":" if config.image_as_built else f"ulimit -u {limits.processes}"
    return _KEEPER.format(before=lines, control=CONTROL, bound=bound)
