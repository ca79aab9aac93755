"""Sandboxes that are started ahead of demand, so that a request gets one in milliseconds."""

import asyncio

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import DataError, SandboxError, StallError, UnsupportedError
from antiphon.sandbox.service.metrics import Metrics
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

CONCURRENT_STARTS = 4  # further starts wait
BACKEND_ERRORS = (SandboxError, UnsupportedError, StallError, DataError, OSError)  # that a backend may raise


class WarmPool:
    """Starts backends, and keeps some of the default kind ready."""

    def __init__(
        self,
        default: ShellSandboxConfig,
        size: int,
        *,
        runtime_dirs: RuntimeDirs,
        deadlines: Deadlines,
        metrics: Metrics,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Start nothing yet.

        Args:
            default: Configuration of the backends that are kept ready.
            size: How many of them.
            runtime_dirs: Holds their pipes and control groups.
            deadlines: Times each start.
            metrics: Counts failures.
            tasks: Runs starts and ends in the background.
        """
        self.size = size
        self._default = default
        self._runtime_dirs = runtime_dirs
        self._deadlines = deadlines
        self._metrics = metrics
        self._tasks = tasks
        self._ready: list[ShellSandbox] = []
        self._starting = 0
        self._starts = asyncio.Semaphore(CONCURRENT_STARTS)

    def __len__(self) -> int:
        return len(self._ready)

    async def add_one(self) -> None:
        """Start one backend and keep it ready; raise if that is impossible."""
        self._ready.append(await self._start(self._default))

    async def try_one(self, config: ShellSandboxConfig) -> None:
        """Start one backend and end it; raise if that is impossible."""
        await self.close_backend(await self._start(config))

    async def take(self, config: ShellSandboxConfig) -> ShellSandbox:
        """Return a ready backend if one has this configuration, else a new one."""
        found = next((each for each in self._ready if each.config == config and not each.ended.done()), None)
        if found is None:
            return await self._start(config)
        self._ready.remove(found)
        self._refill()
        return found

    def maintain(self) -> None:
        """Drop backends that have ended or are too many, and start what is missing."""
        alive = [each for each in self._ready if not each.ended.done()]
        for each in set(self._ready) - set(alive[: self.size]):
            self._ready.remove(each)
            self._tasks.create_task(self.close_backend(each))
        self._refill()

    async def close(self) -> None:
        """End all ready backends."""
        await asyncio.gather(*map(self.close_backend, self._ready))

    async def close_backend(self, backend: ShellSandbox) -> None:
        """End one backend. A failure is counted, not raised."""
        try:
            await backend.close()
        except BACKEND_ERRORS:  # killed, but held by the kernel for a while
            self._metrics.count("antiphon_sandbox_close_failures")

    async def _start(self, config: ShellSandboxConfig) -> ShellSandbox:
        async with self._starts:
            return await ShellSandbox.start(self._runtime_dirs, config, self._deadlines)

    def _refill(self) -> None:
        for _ in range(self.size - len(self._ready) - self._starting):
            self._starting += 1
            self._tasks.create_task(self._add_in_background())

    async def _add_in_background(self) -> None:
        try:
            await self.add_one()
        except BACKEND_ERRORS:
            self._metrics.count("antiphon_sandbox_start_failures")
        finally:
            self._starting -= 1
