"""Blocking environments in worker processes: several to a process, and more processes as they are needed.

An attempt holds a `RemoteEnvironment`, whose methods are asynchronous. They raise what the environment raises, and an error if
its process ends. A call whose caller gives up, because the attempt was cancelled or the call took too long, goes on in the
process. If it is not done when it should have been, the environment hangs: its process accepts no new one, ends with the last
one that it has, and is replaced.
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


class _EnvironmentProcess:
    """A process of the pool."""

    def __init__(self, handle: WorkerHandle, pool: "EnvironmentPool") -> None:
        self.handle = handle
        self.environments: set[RemoteEnvironment] = set()
        self.retired = False
        self._pool = pool
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._late: dict[int, asyncio.TimerHandle] = {}  # calls that nobody waits for
        handle.on_event(self._on_answer)
        handle.on_death(self._on_death)

    def call(self, key: int, method: str, *args: Any) -> "asyncio.Future[Any]":
        number, due = next(self._numbers), self._pool.due()
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: self._expect(number, due) if done.cancelled() else None)
        try:
            self.handle.send("call", key, number, method, *args)
        except AntiphonError as error:  # it has died, and `on_death` has not been called yet
            self._on_death(error)
        return answer

    def _expect(self, number: int, due: float) -> None:
        """Retire the process unless it answers a call in time that nobody waits for any more."""
        if number in self._calls:  # else the answer came as the caller gave up
            self._late[number] = asyncio.get_running_loop().call_at(due, self._pool.retire, self)

    def _on_answer(self, event: tuple[int, bool, Any]) -> None:
        number, well, value = event
        answer = self._calls.pop(number)
        if (timer := self._late.pop(number, None)) is not None:
            timer.cancel()
        if not answer.done():
            if well:
                answer.set_result(value)
            else:
                answer.set_exception(SandboxError(value))

    def _on_death(self, error: AntiphonError) -> None:
        self._pool.forget(self)
        for answer in self._calls.values():
            fail(answer, SandboxError(f"the process of the environment ended: {error}"))
        self._calls.clear()
        for timer in self._late.values():
            timer.cancel()


class RemoteEnvironment:
    """One environment in another process: an `Environment` whose methods are asynchronous."""

    def __init__(self, pool: "EnvironmentPool", process: _EnvironmentProcess, key: int) -> None:
        self._pool = pool
        self._process = process
        self._key = key
        self._given_up = False  # a call, which may still run

    async def reset(self, seed: int) -> Reset:
        """Reset the environment."""
        result: Reset = await self._call("reset", seed)
        return result

    async def step(self, action: str) -> Step:
        """Take a step."""
        result: Step = await self._call("step", action)
        return result

    async def close(self) -> None:
        """Close the environment, without waiting if it is at a call that was given up, and leave its process."""
        try:
            if self._given_up:
                self._process.call(self._key, "close").cancel()
            else:
                await self._call("close")
        finally:
            self._pool.release(self, self._process, self._key)

    async def _call(self, method: str, *args: Any) -> Any:
        answer = self._process.call(self._key, method, *args)
        try:
            return await answer
        finally:
            self._given_up = self._given_up or answer.cancelled()


class EnvironmentPool:
    """The processes with the environments of one task."""

    def __init__(self, config: EnvironmentPoolConfig, spawn: Spawn, seconds: float) -> None:
        """Create a pool without processes.

        Args:
            config: Number of processes, and of environments in each.
            spawn: Starts a process.
            seconds: Time within which a call is done, or else hangs.
        """
        self._config = config
        self._seconds = seconds
        self._spawn = spawn
        self._processes: list[_EnvironmentProcess] = []
        self._keys = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def processes(self) -> int:
        """Number of processes."""
        return len(self._processes)

    def make(self, prompt: Prompt) -> RemoteEnvironment:
        """Return an environment for a prompt."""
        process = self._choose()
        key = next(self._keys)
        environment = RemoteEnvironment(self, process, key)
        process.environments.add(environment)
        process.handle.send("open", key, prompt)
        return environment

    def release(self, environment: RemoteEnvironment, process: _EnvironmentProcess, key: int) -> None:
        """Remove an environment that has ended. A process beyond the minimum ends when it has had none for a while."""
        process.environments.discard(environment)
        if process in self._processes and not self._closed:
            with suppress(AntiphonError):  # it has died
                process.handle.send("drop", key)
        if not process.environments:
            if process.retired:
                self._end(process)
            elif len(self._processes) > self._config.workers:
                asyncio.get_running_loop().call_later(self._config.idle_seconds, self._end_if_idle, process)

    def due(self) -> float:
        """Return the time at which a call that begins now hangs."""
        return asyncio.get_running_loop().time() + self._seconds

    def retire(self, process: _EnvironmentProcess) -> None:
        """Give a process no more environments, because one of its environments hangs; end it with the last one."""
        process.retired = True
        if not process.environments and process in self._processes:
            self._end(process)

    async def close(self) -> None:
        """End all processes."""
        self._closed = True
        for process in list(self._processes):
            self._end(process)
        if self._closing:
            await asyncio.wait(self._closing)

    def _choose(self) -> _EnvironmentProcess:
        """Return the process with the fewest environments; a new one if all are full and another is allowed."""
        open_ = [process for process in self._processes if not process.retired]
        least = min(open_, key=lambda process: len(process.environments), default=None)
        full = least is None or len(least.environments) >= self._config.environments
        if len(open_) < self._config.workers or (full and len(open_) < self._config.max_workers):
            least = _EnvironmentProcess(self._spawn(), self)
            self._processes.append(least)
        assert least is not None
        return least

    def forget(self, process: _EnvironmentProcess) -> None:
        """Remove a process that has ended."""
        if process in self._processes:
            self._processes.remove(process)

    def _end_if_idle(self, process: _EnvironmentProcess) -> None:
        if process in self._processes and not process.environments and len(self._processes) > self._config.workers:
            self._end(process)

    def _end(self, process: _EnvironmentProcess) -> None:
        self.forget(process)
        if process.retired:  # it hangs, and would not answer
            process.handle.kill()
        task = asyncio.get_running_loop().create_task(process.handle.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
