"""Environments that block, in processes: many to a process, as many processes as it takes, none that hangs kept for long.

An attempt holds a `RemoteEnvironment`, whose methods can be awaited. They raise what the environment raises, and an error when
its process ends. A call whose caller has given up has taken too long: its process accepts no new environment, ends with the
last one it has, and is replaced.
"""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from antiphon.core.deadlines import fail
from antiphon.core.errors import AntiphonError, SandboxError
from antiphon.core.types import Prompt
from antiphon.core.workers import WorkerHandle
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.config import EnvironmentPoolConfig

Spawn = Callable[[], WorkerHandle]


class _Host:
    """One process, as the pool sees it."""

    def __init__(self, handle: WorkerHandle, forget: Callable[["_Host"], None]) -> None:
        self.handle = handle
        self.worlds: set[RemoteEnvironment] = set()
        self.retired = False
        self._forget = forget
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        handle.on_event(self._answered)
        handle.on_death(self._died)

    def call(self, key: int, method: str, *args: Any) -> "asyncio.Future[Any]":
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self.handle.send("call", key, number, method, *args)
        except AntiphonError as error:  # it has died, and nobody has been told yet
            self._died(error)
        return answer

    def _answered(self, event: tuple[int, bool, Any]) -> None:
        number, well, value = event
        answer = self._calls.pop(number)
        if not answer.done():
            if well:
                answer.set_result(value)
            else:
                answer.set_exception(SandboxError(value))

    def _died(self, error: AntiphonError) -> None:
        self._forget(self)
        for answer in self._calls.values():
            fail(answer, SandboxError(f"the process of the environment ended: {error}"))
        self._calls.clear()


class RemoteEnvironment:
    """One environment in another process: an `Environment` whose methods are asynchronous."""

    def __init__(self, pool: "EnvironmentPool", host: _Host, key: int) -> None:
        self._pool = pool
        self._host = host
        self._key = key
        self._hung = False

    async def reset(self, seed: int) -> Reset:
        """See `Environment.reset`."""
        result: Reset = await self._call("reset", seed)
        return result

    async def step(self, action: str) -> Step:
        """See `Environment.step`."""
        result: Step = await self._call("step", action)
        return result

    async def close(self) -> None:
        """See `Environment.close`. One that hangs is not asked."""
        try:
            if not self._hung:
                await self._call("close")
        finally:
            self._pool.give_back(self, self._host, self._key)

    async def _call(self, method: str, *args: Any) -> Any:
        answer = self._host.call(self._key, method, *args)
        try:
            return await answer
        finally:
            if answer.cancelled():
                self._hung = True
                self._pool.retire(self._host)


class EnvironmentPool:
    """The processes for the environments of one task."""

    def __init__(self, config: EnvironmentPoolConfig, spawn: Spawn) -> None:
        self._config = config
        self._spawn = spawn
        self._hosts: list[_Host] = []
        self._keys = itertools.count()
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def processes(self) -> int:
        """How many there are now."""
        return len(self._hosts)

    def make(self, prompt: Prompt) -> RemoteEnvironment:
        """An environment for a prompt."""
        host = self._choose()
        key = next(self._keys)
        world = RemoteEnvironment(self, host, key)
        host.worlds.add(world)
        host.handle.send("open", key, prompt)
        return world

    def give_back(self, world: RemoteEnvironment, host: _Host, key: int) -> None:
        """A world has ended. A process beyond those that are always there ends after a while without any."""
        host.worlds.discard(world)
        if host in self._hosts and not self._closed:
            with suppress(AntiphonError):  # it has died
                host.handle.send("drop", key)
        if not host.worlds:
            if host.retired:
                self._end(host)
            elif len(self._hosts) > self._config.workers:
                asyncio.get_running_loop().call_later(self._config.idle_seconds, self._end_if_idle, host)

    def retire(self, host: _Host) -> None:
        """Give a process no more environments, because one of those that it has hangs."""
        host.retired = True

    async def close(self) -> None:
        """End all processes."""
        self._closed = True
        for host in list(self._hosts):
            self._end(host)
        if self._ending:
            await asyncio.wait(self._ending)

    def _choose(self) -> _Host:
        """The process with the fewest environments, a new one if all are full and there may be more."""
        open_ = [host for host in self._hosts if not host.retired]
        least = min(open_, key=lambda host: len(host.worlds), default=None)
        full = least is None or len(least.worlds) >= self._config.environments
        if len(open_) < self._config.workers or (full and len(open_) < self._config.max_workers):
            least = _Host(self._spawn(), self._forget)
            self._hosts.append(least)
        assert least is not None
        return least

    def _forget(self, host: _Host) -> None:
        if host in self._hosts:
            self._hosts.remove(host)

    def _end_if_idle(self, host: _Host) -> None:
        if host in self._hosts and not host.worlds and len(self._hosts) > self._config.workers:
            self._end(host)

    def _end(self, host: _Host) -> None:
        self._forget(host)
        if host.retired:  # what hangs in it does not listen
            host.handle.kill()
        task = asyncio.get_running_loop().create_task(host.handle.close())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
