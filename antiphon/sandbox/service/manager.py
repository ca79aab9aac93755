"""The sandboxes of a service: what there are, how they begin and end, and how much they may use.

    pending -> running -> stopped -> deleted
      |  ^                 ^   |
      |  +-- restart ----- | --+
      +-- no start, stop --+

A running sandbox stops when it is told to, when nothing has been asked of it for too long, or when its box ends by itself.
Nothing here knows HTTP. Whatever is not done is a `Refused`, with the reason.
"""

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import SandboxError, StallError, UnsupportedError
from antiphon.sandbox.base import Limits
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.http_errors import Reason, Refused
from antiphon.sandbox.service.metrics import Metrics
from antiphon.sandbox.service.records import Sandbox, State, Wish
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.files import SandboxFiles
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

T = TypeVar("T")

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
LEAST_MEMORY = 32 << 20  # bytes; bash does not start in much less
LEAST_DISK = 1 << 20
PATIENCE_SECONDS = 1.0  # that a request to start waits for the start, so that most clients need not ask again
SWEEP_SECONDS = 1.0  # between two looks for what has been idle too long
STARTS = 4  # boxes that are made at the same time; the others wait
KEPT = 1000  # sandboxes that have ended and that can still be asked about; older ones are forgotten
TROUBLE = (SandboxError, UnsupportedError, StallError, OSError)  # that a box may make


class Sandboxes:
    """All sandboxes of a service. Use as `async with`; leaving it leaves nothing behind."""

    def __init__(self, config: ServiceConfig, metrics: Metrics) -> None:
        """Nothing is started before it is entered."""
        self.config = config
        self.metrics = metrics
        self._all: dict[str, Sandbox] = {}
        self._warm: list[ShellSandbox] = []
        self._warming = 0
        self._deadlines = Deadlines()
        self._making = asyncio.Semaphore(STARTS)
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        """Ready when a box could be made: where that is impossible, the service does not begin."""
        self._rooms = RuntimeDirs()
        try:
            self._warm.append(await self._make(self._box_config(Wish())))
            await self._tasks.__aenter__()
        except BaseException:
            self._rooms.close()
            raise
        self._sweeper = self._tasks.create_task(self._sweep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.config = self.config.model_copy(update={"warm": 0, "stopped_minutes": 0.0})
        self._sweeper.cancel()
        try:
            await asyncio.gather(*(self._end(sandbox, "shutdown") for sandbox in self.all()))
            await self._tasks.__aexit__(kind, error, trace)
        finally:
            await asyncio.gather(*map(self._close_box, self._warm))
            self._rooms.close()

    def get(self, sandbox_id: str) -> Sandbox:
        """The sandbox of this name, whatever its state."""
        if sandbox_id not in self._all:
            raise Refused(Reason.UNKNOWN, f"there is no sandbox {sandbox_id!r}")
        return self._all[sandbox_id]

    def all(self) -> list[Sandbox]:
        """All that are known, oldest first."""
        return list(self._all.values())

    def now(self) -> float:
        """By the clock that `Sandbox.used` goes by, in seconds."""
        return asyncio.get_running_loop().time()

    def idle_left(self, sandbox: Sandbox) -> float:
        """Seconds until it is stopped, if nothing is asked of it."""
        most = self.config.idle_minutes * 60
        return (
            sandbox.used
            + min(most, most if sandbox.wish.idle_seconds is None else sandbox.wish.idle_seconds)
            - self.now()
        )

    def gauges(self) -> dict[str, dict[str, float]]:
        """For `Metrics.text`."""
        states = Counter(sandbox.state for sandbox in self.all())
        live = [sandbox for sandbox in self.all() if sandbox.live]
        return {
            "antiphon_sandboxes": {state.value: states[state] for state in State},
            "antiphon_sandboxes_warm": {"": len(self._warm)},
            "antiphon_sandbox_sessions": {"": sum(len(sandbox.sessions) for sandbox in live)},
            "antiphon_sandbox_memory_bytes": {"": sum(sandbox.box_config.limits.memory for sandbox in live)},
        }

    # --- what is asked for -------------------------------------------------------------------------------------------

    async def start(self, wish: Wish, patience: float = PATIENCE_SECONDS) -> Sandbox:
        """A new sandbox; it may still be pending after `patience` seconds."""
        sandbox_id = secrets.token_hex(16) if wish.sandbox_id is None else wish.sandbox_id
        if not ID.fullmatch(sandbox_id):
            raise Refused(Reason.INPUT, f"sandbox_id {sandbox_id!r}: it must match {ID.pattern}")
        if sandbox_id in self._all and self._all[sandbox_id].state is not State.DELETED:
            raise Refused(Reason.STATE, f"sandbox {sandbox_id!r} exists already")
        config = self._box_config(wish)
        self._admit(config)
        self._all.pop(sandbox_id, None)  # its place among the old ones
        sandbox = self._all[sandbox_id] = Sandbox(id=sandbox_id, wish=wish, box_config=config)
        self._begin(sandbox, "start")
        await self._started(sandbox, patience)
        return sandbox

    async def stop(self, sandbox_id: str) -> None:
        """End what runs in it. Its work directory is kept for a while, for `restart`."""
        sandbox = self.get(sandbox_id)
        async with sandbox.turn:
            if sandbox.live:
                await self._end(sandbox, "stop")

    async def delete(self, sandbox_id: str) -> None:
        """Remove what a stopped sandbox has left."""
        sandbox = self.get(sandbox_id)
        async with sandbox.turn:
            if sandbox.live:
                raise Refused(Reason.STATE, f"sandbox {sandbox_id!r} is {sandbox.state}: it must be stopped first")
            self._delete(sandbox, "delete")

    async def restart(self, sandbox_id: str, patience: float = PATIENCE_SECONDS) -> Sandbox:
        """Start a stopped sandbox again, with its work directory as it was."""
        sandbox = self.get(sandbox_id)
        async with sandbox.turn:
            if sandbox.state is not State.STOPPED:
                raise Refused(
                    Reason.STATE, f"sandbox {sandbox_id!r} is {sandbox.state}: only a stopped one can restart"
                )
            if sandbox.snapshot is None:
                raise Refused(Reason.STATE, f"sandbox {sandbox_id!r} cannot restart: its files are lost")
            self._admit(sandbox.box_config)
            self._begin(sandbox, "restart")
        await self._started(sandbox, patience)
        return sandbox

    # --- how they begin ----------------------------------------------------------------------------------------------

    def _box_config(self, wish: Wish) -> ShellSandboxConfig:
        most = self.config
        for name, value, least in (("memory", wish.memory, LEAST_MEMORY), ("disk", wish.disk, LEAST_DISK)):
            if value is not None and value < least:
                raise Refused(Reason.INPUT, f"{name}: {value} bytes are too little; give at least {least >> 20} MiB")
        memory, disk = most.sandbox_memory << 20, most.sandbox_disk << 20
        disk = min(disk, wish.disk or disk)
        limits = Limits(
            seconds=most.command_seconds,
            cpu_seconds=most.command_seconds,
            memory=min(memory, wish.memory or memory),
            file_size=disk,
            disk=disk,
            processes=most.processes,
            output=most.output << 10,
        )
        return ShellSandboxConfig(limits=limits, image=most.image)

    def _admit(self, config: ShellSandboxConfig) -> None:
        live = [sandbox for sandbox in self.all() if sandbox.live]
        if len(live) >= self.config.sandboxes:
            raise Refused(Reason.QUOTA, f"{len(live)} sandboxes are there, and there may be no more; stop one first")
        free = (self.config.memory << 20) - sum(sandbox.box_config.limits.memory for sandbox in live)
        if config.limits.memory > free:
            raise Refused(
                Reason.QUOTA,
                f"memory: of {self.config.memory} MiB for all sandboxes {free >> 20} are left, not "
                f"{config.limits.memory >> 20}; ask for less, or stop one first",
            )

    def _begin(self, sandbox: Sandbox, event: str) -> None:
        sandbox.enter(State.PENDING, event)
        sandbox.failure = ""
        sandbox.starting = self._tasks.create_task(self._start(sandbox))

    async def _started(self, sandbox: Sandbox, patience: float) -> None:
        """Return when it has started or failed to, or after `patience` seconds."""
        if sandbox.starting is not None:
            with suppress(StallError):
                await self._wait(asyncio.wait([sandbox.starting]), sandbox, "start", patience)

    async def _start(self, sandbox: Sandbox) -> None:
        began = self.now()
        seconds = min(sandbox.wish.start_seconds or self.config.start_seconds, self.config.start_seconds)
        try:
            box = await self._wait(self._furnish(sandbox), sandbox, "start", seconds)
        except TROUBLE as error:
            self.metrics.count("antiphon_sandbox_start_failures")
            sandbox.failure = f"it did not start: {str(error).splitlines()[0]}"
            sandbox.enter(State.STOPPED, "start failed")
            await self._close(sandbox)
        else:
            self.metrics.count("antiphon_sandbox_starts")
            self.metrics.observe("antiphon_sandbox_start_seconds", self.now() - began)
            sandbox.used = self.now()
            sandbox.enter(State.RUNNING, "alive")
            box.ended.add_done_callback(lambda _: self._mourn(sandbox, box))
        finally:
            sandbox.starting = None

    async def _furnish(self, sandbox: Sandbox) -> ShellSandbox:
        sandbox.box = box = await self._take(sandbox.box_config)
        sandbox.files = SandboxFiles(box)
        if sandbox.snapshot is not None:
            await sandbox.files.restore(sandbox.snapshot)
            _drop_snapshot(sandbox)
        return box

    async def _take(self, config: ShellSandboxConfig) -> ShellSandbox:
        """A box: one that waits, if there is one like this, else a new one."""
        ready = next((box for box in self._warm if box.config == config and not box.ended.done()), None)
        if ready is None:
            return await self._make(config)
        self._warm.remove(ready)
        self._refill()
        return ready

    async def _make(self, config: ShellSandboxConfig) -> ShellSandbox:
        async with self._making:
            return await ShellSandbox.start(self._rooms, config, self._deadlines)

    def _refill(self) -> None:
        for _ in range(self.config.warm - len(self._warm) - self._warming):
            self._warming += 1
            self._tasks.create_task(self._warm_up())

    async def _warm_up(self) -> None:
        try:
            box = await self._make(self._box_config(Wish()))
            self._warm.append(box)
        except TROUBLE:
            self.metrics.count("antiphon_sandbox_start_failures")
        finally:
            self._warming -= 1

    # --- how they end ------------------------------------------------------------------------------------------------

    async def _end(self, sandbox: Sandbox, event: str) -> None:
        """Stop a sandbox that lives, and keep its work directory if that is wanted."""
        if sandbox.starting is not None:
            sandbox.starting.cancel()
            await asyncio.wait([sandbox.starting])
        files = sandbox.files if sandbox.state is State.RUNNING and self._keep_seconds(sandbox) else None
        if sandbox.live:
            sandbox.enter(State.STOPPED, event)
        try:
            if files is not None and sandbox.box is not None:
                await sandbox.box.end_processes()  # nothing is to change the files, or to hold up who reads them
                path = self._rooms.path / f"{sandbox.id}.snapshot"
                await files.snapshot(path)
                sandbox.snapshot = path
        except TROUBLE as error:
            sandbox.failure = f"its files are lost: {str(error).splitlines()[0]}"
        finally:
            await self._close(sandbox)
        self._forget()

    async def _close(self, sandbox: Sandbox) -> None:
        for session in (*sandbox.sessions.values(), *sandbox.spare):
            session.close()
        sandbox.sessions.clear()
        sandbox.spare.clear()
        if sandbox.files is not None:
            sandbox.files.close()
            sandbox.files = None
        if sandbox.box is not None:
            box, sandbox.box = sandbox.box, None
            await self._close_box(box)

    async def _close_box(self, box: ShellSandbox) -> None:
        try:
            await box.close()
        except TROUBLE:  # killed, and yet not gone: the kernel holds it, and lets it go in the end
            self.metrics.count("antiphon_sandbox_close_failures")

    def _mourn(self, sandbox: Sandbox, box: ShellSandbox) -> None:
        """A box has ended. If nobody ended it, the sandbox is lost."""
        if sandbox.box is box and sandbox.state is State.RUNNING:
            self.metrics.count("antiphon_sandbox_losses")
            sandbox.failure = "it ended by itself, or was killed; its files are lost"
            sandbox.enter(State.STOPPED, "lost")
            self._tasks.create_task(self._close(sandbox))

    def _delete(self, sandbox: Sandbox, event: str) -> None:
        if sandbox.state is not State.DELETED:
            _drop_snapshot(sandbox)
            sandbox.enter(State.DELETED, event)

    def _forget(self) -> None:
        """Forget what ended long ago, so that the list does not grow for ever."""
        ended = [sandbox for sandbox in self.all() if not sandbox.live and sandbox.box is None]
        for sandbox in ended[: max(0, len(ended) - KEPT)]:
            self._delete(sandbox, "forgotten")
            del self._all[sandbox.id]

    def _keep_seconds(self, sandbox: Sandbox) -> float:
        most = self.config.stopped_minutes * 60
        return most if sandbox.wish.keep_seconds is None else min(most, sandbox.wish.keep_seconds)

    async def _sweep(self) -> None:
        """Stop what has been idle for too long, delete what has been stopped for too long, keep boxes warm; for ever."""
        while True:
            living = [box for box in self._warm if not box.ended.done()]
            for box in set(self._warm) - set(living[: self.config.warm]):
                self._warm.remove(box)
                self._tasks.create_task(self._close_box(box))
            self._refill()
            for sandbox in self.all():
                if sandbox.turn.locked():
                    continue
                if self._expired(sandbox):
                    self._tasks.create_task(self._expire(sandbox))
                stopped = sandbox.since(State.STOPPED) if sandbox.state is State.STOPPED else None
                if stopped is not None and time.time() - stopped > self._keep_seconds(sandbox):
                    self._delete(sandbox, "kept long enough")
            await asyncio.sleep(SWEEP_SECONDS)

    def _expired(self, sandbox: Sandbox) -> bool:
        return sandbox.state is State.RUNNING and not sandbox.busy and self.idle_left(sandbox) < 0

    async def _expire(self, sandbox: Sandbox) -> None:
        async with sandbox.turn:
            if self._expired(sandbox):
                await self._end(sandbox, "idle")

    async def _wait(self, awaitable: Awaitable[T], sandbox: Sandbox, name: str, seconds: float) -> T:
        on = f"sandbox {sandbox.id}"
        return await self._deadlines.wait(awaitable, name=name, owner="the service", on=on, deadline=seconds)


def _drop_snapshot(sandbox: Sandbox) -> None:
    if sandbox.snapshot is not None:
        sandbox.snapshot.unlink(missing_ok=True)
        sandbox.snapshot = None
