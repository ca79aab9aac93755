"""Simulated environments of agents: they take time and return observations of drawn lengths."""

import asyncio
from typing import Any

from antiphon.core.config import Config
from antiphon.core.deadlines import succeed
from antiphon.simulate.faults import Faults
from antiphon.simulate.workloads import DistributionConfig


class EnvironmentConfig(Config):
    """Configuration of simulated environments. `rollout.max_turns` limits the turns of an attempt."""

    reset_seconds: DistributionConfig = DistributionConfig(mean=0)
    step_seconds: DistributionConfig = DistributionConfig(mean=1)
    turns: DistributionConfig = DistributionConfig(mean=10)
    observation_tokens: DistributionConfig = DistributionConfig(mean=50, minimum=1)
    lock_step: bool = False
    """All environments step together, each time as long as the slowest takes: the synchronous baseline."""


class LockStep:
    """Steps all open environments at once, each time as long as the slowest takes: the synchronous baseline."""

    def __init__(self) -> None:
        self.open_count = 0
        self._seconds: list[float] = []
        self._done: asyncio.Future[None] | None = None

    async def wait_step(self, seconds: float) -> None:
        """Wait until all open environments have called this, and then as long as the slowest takes."""
        loop = asyncio.get_running_loop()
        self._done = self._done or loop.create_future()
        done = self._done
        self._seconds.append(seconds)
        self.start_if_complete()
        await asyncio.shield(done)

    def start_if_complete(self) -> None:
        """Start the step if every open environment waits for it."""
        if self._done is not None and len(self._seconds) >= self.open_count:
            loop, done = asyncio.get_running_loop(), self._done
            loop.call_later(max(self._seconds), self._end_step, done)
            self._seconds, self._done = [], None

    @staticmethod
    def _end_step(step: asyncio.Future[None]) -> None:
        succeed(step, None)


class SimulatedEnvironment:
    """An environment that takes time and returns observations of drawn lengths; it ends after a drawn number of turns."""

    def __init__(self, config: EnvironmentConfig, seed: int, faults: Faults, lock_step: LockStep | None = None) -> None:
        self._lock_step = lock_step
        self._config = config
        self._seed = seed
        self._faults = faults
        self._slow = 1.0
        self._is_open = False
        self._turns = 0

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Return the first observation."""
        self._slow = self._faults.slow_factor("environment.slow")
        if self._lock_step is not None:
            self._lock_step.open_count += 1
            self._is_open = True
        await self._wait(self._config.reset_seconds.draw(self._seed, "reset"))
        return str(round(self._config.observation_tokens.draw(self._seed, "observation", 0))), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one turn."""
        self._turns += 1
        await self._wait(self._config.step_seconds.draw(self._seed, "step", self._turns))
        is_over = self._turns >= self._config.turns.draw(self._seed, "turns")
        return (
            str(round(self._config.observation_tokens.draw(self._seed, "observation", self._turns))),
            0.0,
            is_over,
            False,
            {},
        )

    def close(self) -> None:
        """Leave the lock step."""
        if self._lock_step is not None and self._is_open:
            self._lock_step.open_count -= 1
            self._lock_step.start_if_complete()

    async def _wait(self, seconds: float) -> None:
        if self._faults.should_fail("environment.fail"):
            raise RuntimeError("the simulated environment failed")
        if self._faults.should_fail("environment.hang"):
            await asyncio.Event().wait()
        if self._lock_step is not None:
            await self._lock_step.wait_step(seconds * self._slow)
        else:
            await asyncio.sleep(seconds * self._slow)
