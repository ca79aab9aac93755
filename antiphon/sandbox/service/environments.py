"""The environments of a service: clients make, reset, step and close them; each runs in a process of its own.

The caller supplies the names of the environments and a function that starts the process of one.
"""

import asyncio
import difflib
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import AntiphonError, StallError
from antiphon.core.workers import WorkerHandle
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.metrics import Metrics
from antiphon.sandbox.service.quotas import check_environments

SWEEP_SECONDS = 1.0  # between two checks for idle environments

Spawn = Callable[[str], WorkerHandle]
"""Starts the process of an environment by name. The process answers `reset(seed)`, `step(action)` and `ready()`."""


@dataclass(slots=True, kw_only=True, eq=False)
class HostedEnvironment:
    """One open environment and its process."""

    id: str
    name: str
    handle: WorkerHandle
    used: float
    was_reset: bool = False
    steps: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Environments:
    """All environments of a service. Use it as `async with`; leaving the block ends them."""

    def __init__(self, config: ServiceConfig, metrics: Metrics, names: Sequence[str], spawn: Spawn) -> None:
        """Start nothing yet.

        Args:
            config: Quotas and time limits.
            metrics: Counts environments and losses.
            names: Environments that clients may make; any other is refused.
            spawn: Starts the process of an environment.
        """
        self.names = tuple(names)
        self._config = config
        self._metrics = metrics
        self._spawn = spawn
        self._all: dict[str, HostedEnvironment] = {}
        self._deadlines = Deadlines()
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._sweeper = self._tasks.create_task(self._sweep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sweeper.cancel()
        for environment in self.all():
            self._kill(environment)
        await self._tasks.__aexit__(kind, error, trace)

    def all(self) -> list[HostedEnvironment]:
        """Return the open environments, oldest first."""
        return list(self._all.values())

    async def make(self, name: str, environment_id: str | None = None) -> str:
        """Open an environment and return its id."""
        if name not in self.names:
            nearest = difflib.get_close_matches(name, self.names, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise RefusedError(
                Reason.UNKNOWN, f"there is no environment {name!r}: {hint}valid are {', '.join(self.names) or 'none'}"
            )
        check_environments(self._config.environments, len(self._all))
        environment_id = f"env-{secrets.token_hex(16)}" if environment_id is None else environment_id
        if environment_id in self._all:
            raise RefusedError(Reason.STATE, f"environment {environment_id!r} exists already")
        environment = HostedEnvironment(id=environment_id, name=name, handle=self._spawn(name), used=self._now())
        self._all[environment.id] = environment
        self._metrics.count("antiphon_environments_made", environment=name)
        await self._call(environment, "ready")
        return environment.id

    async def reset(self, environment_id: str, seed: int | None) -> tuple[str, dict[str, Any]]:
        """Reset an environment, with a random seed if none is given; return observation and info."""
        environment = self._get(environment_id)
        observation, info = await self._call(environment, "reset", secrets.randbelow(1 << 31) if seed is None else seed)
        environment.was_reset = True
        return observation, info

    async def step(self, environment_id: str, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Step an environment; return observation, reward, terminated, truncated and info."""
        environment = self._get(environment_id)
        if not environment.was_reset:
            raise RefusedError(Reason.STATE, f"environment {environment_id!r} must be reset first")
        environment.steps += 1
        observation, reward, terminated, truncated, info = await self._call(environment, "step", action)
        if not math.isfinite(reward):
            self._kill(environment)
            raise RefusedError(
                Reason.LOST, f"environment {environment_id!r} returned a reward of {reward} and was closed"
            )
        return observation, float(reward), bool(terminated), bool(truncated), info

    async def close(self, environment_id: str) -> None:
        """Close an environment; kill its process if it does not end in time."""
        environment = self._get(environment_id)
        del self._all[environment_id]
        try:
            await self._wait(environment.handle.close(), environment, "close")
        except AntiphonError:
            self._kill(environment)

    def _get(self, environment_id: str) -> HostedEnvironment:
        if environment_id not in self._all:
            raise RefusedError(Reason.UNKNOWN, f"there is no environment {environment_id!r}")
        return self._all[environment_id]

    async def _call(self, environment: HostedEnvironment, method: str, *args: Any) -> Any:
        """Call a method of an environment. One that fails, hangs or dies is closed, because its state is unknown."""
        try:
            async with environment.lock:
                return await self._wait(environment.handle.call(method, *args), environment, method)
        except AntiphonError as error:
            self._kill(environment)
            self._metrics.count("antiphon_environment_losses")
            cause = "took too long" if isinstance(error, StallError) else str(error).strip().splitlines()[-1]
            raise RefusedError(
                Reason.LOST, f"environment {environment.name!r} was closed: {method} failed: {cause}"
            ) from error
        finally:
            environment.used = self._now()

    async def _wait(self, awaitable: Any, environment: HostedEnvironment, name: str) -> Any:
        seconds = self._config.start_seconds if name == "ready" else self._config.environment_seconds
        on = f"environment {environment.id}"
        return await self._deadlines.wait(awaitable, name=name, owner="the service", on=on, deadline=seconds)

    def _kill(self, environment: HostedEnvironment) -> None:
        self._all.pop(environment.id, None)
        environment.handle.kill()
        self._tasks.create_task(environment.handle.close())  # collects the ended process

    async def _sweep(self) -> None:
        """Close idle environments, until cancelled."""
        while True:
            for environment in self.all():
                if not environment.lock.locked() and self._now() - environment.used > self._config.idle_minutes * 60:
                    self._kill(environment)
            await asyncio.sleep(SWEEP_SECONDS)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
