"""The environments of a service: worlds of text that clients make, reset, step and close, each in a process of its own.

What a world is and how its process is started comes from above: here it is a name, and a handle to call.
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
from antiphon.sandbox.service.http_errors import Reason, Refused
from antiphon.sandbox.service.metrics import Metrics

SWEEP_SECONDS = 1.0  # between two looks for what has been idle too long

Spawn = Callable[[str], WorkerHandle]
"""Starts a process that holds a world of this name; it answers `reset(seed)`, `step(action)` and `ready()`."""


@dataclass(slots=True, kw_only=True, eq=False)
class World:
    """One environment."""

    id: str
    name: str
    handle: WorkerHandle
    used: float
    begun: bool = False
    steps: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Environments:
    """All environments of a service. Use as `async with`; leaving it leaves nothing behind."""

    def __init__(self, config: ServiceConfig, metrics: Metrics, names: Sequence[str], spawn: Spawn) -> None:
        """`names` are those that clients may make; any other is refused."""
        self.names = tuple(names)
        self._config = config
        self._metrics = metrics
        self._spawn = spawn
        self._all: dict[str, World] = {}
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
        for world in self.all():
            self._kill(world)
        await self._tasks.__aexit__(kind, error, trace)

    def all(self) -> list[World]:
        """Those that are open, oldest first."""
        return list(self._all.values())

    async def make(self, name: str, world_id: str | None = None) -> str:
        """A new environment of this name; the answer is what it is called from now on."""
        if name not in self.names:
            nearest = difflib.get_close_matches(name, self.names, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise Refused(
                Reason.UNKNOWN, f"there is no environment {name!r}: {hint}valid are {', '.join(self.names) or 'none'}"
            )
        if len(self._all) >= self._config.environments:
            raise Refused(
                Reason.QUOTA, f"{len(self._all)} environments are open, and there may be no more; close one first"
            )
        world_id = f"env-{secrets.token_hex(16)}" if world_id is None else world_id
        if world_id in self._all:
            raise Refused(Reason.STATE, f"environment {world_id!r} exists already")
        world = World(id=world_id, name=name, handle=self._spawn(name), used=self._now())
        self._all[world.id] = world
        self._metrics.count("antiphon_environments_made", environment=name)
        await self._call(world, "ready")
        return world.id

    async def reset(self, world_id: str, seed: int | None) -> tuple[str, dict[str, Any]]:
        """Begin, from a seed that is drawn if none is given."""
        world = self._get(world_id)
        observation, info = await self._call(world, "reset", secrets.randbelow(1 << 31) if seed is None else seed)
        world.begun = True
        return observation, info

    async def step(self, world_id: str, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act."""
        world = self._get(world_id)
        if not world.begun:
            raise Refused(Reason.STATE, f"environment {world_id!r} has not begun: reset it first")
        world.steps += 1
        observation, reward, terminated, truncated, info = await self._call(world, "step", action)
        if not math.isfinite(reward):
            self._kill(world)
            raise Refused(Reason.LOST, f"environment {world_id!r} gave a reward of {reward}, and was closed")
        return observation, float(reward), bool(terminated), bool(truncated), info

    async def close(self, world_id: str) -> None:
        """End an environment, politely."""
        world = self._get(world_id)
        del self._all[world_id]
        try:
            await self._wait(world.handle.close(), world, "close")
        except AntiphonError:
            self._kill(world)

    def _get(self, world_id: str) -> World:
        if world_id not in self._all:
            raise Refused(Reason.UNKNOWN, f"there is no environment {world_id!r}")
        return self._all[world_id]

    async def _call(self, world: World, method: str, *args: Any) -> Any:
        """Call one method; a world that fails, hangs or dies is closed: what it would do next means nothing."""
        try:
            async with world.turn:
                return await self._wait(world.handle.call(method, *args), world, method)
        except AntiphonError as error:
            self._kill(world)
            self._metrics.count("antiphon_environment_losses")
            why = "took too long" if isinstance(error, StallError) else str(error).strip().splitlines()[-1]
            raise Refused(Reason.LOST, f"environment {world.name!r} was closed: {method} failed: {why}") from error
        finally:
            world.used = self._now()

    async def _wait(self, awaitable: Any, world: World, name: str) -> Any:
        seconds = self._config.start_seconds if name == "ready" else self._config.environment_seconds
        on = f"environment {world.id}"
        return await self._deadlines.wait(awaitable, name=name, owner="the service", on=on, deadline=seconds)

    def _kill(self, world: World) -> None:
        self._all.pop(world.id, None)
        world.handle.kill()
        self._tasks.create_task(world.handle.close())  # reaps it

    async def _sweep(self) -> None:
        """Close what has been idle for too long; for ever."""
        while True:
            for world in self.all():
                if not world.turn.locked() and self._now() - world.used > self._config.idle_minutes * 60:
                    self._kill(world)
            await asyncio.sleep(SWEEP_SECONDS)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
