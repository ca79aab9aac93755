"""Faults of a simulation, injected at named points: at times or by chance, drawn from the run's seed."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field, model_validator

from antiphon.core.config import Config
from antiphon.core.rng import generator
from antiphon.record.events import Events
from antiphon.simulate.engine import SimulatedEngine

TIMED = ("engine.crash", "engine.hang", "engine.slow")


class FaultConfig(Config):
    """One kind of fault."""

    point: Literal[
        "engine.crash",
        "engine.hang",
        "engine.slow",
        "engine.load",
        "environment.slow",
        "environment.hang",
        "environment.fail",
        "reward.lost",
        "learner.crash",
    ]
    """`engine.crash`, `.hang` and `.slow` affect one engine, drawn anew each time; the others affect the current call."""
    at: float = Field(0.0, ge=0.0)
    """For crash, hang and slow of engines: second of the first fault."""
    every: float = Field(math.inf, gt=0.0, allow_inf_nan=True)
    """For these three: mean seconds to the next fault, exponentially distributed."""
    chance: float = Field(0.0, ge=0.0, le=1.0)
    """For the others: probability at each call."""
    factor: float = Field(10.0, ge=1.0)
    """Factor on the time of what is slow."""
    seconds: float = Field(math.inf, gt=0.0, allow_inf_nan=True)
    """Seconds for which an engine is slow."""

    @model_validator(mode="after")
    def _check_trigger(self) -> "FaultConfig":
        if self.point in TIMED and self.chance:
            raise ValueError(f"{self.point} happens at times (at, every), not by chance")
        if self.point not in TIMED and not self.chance:
            raise ValueError(f"{self.point} happens by chance: give it one")
        return self


class Faults:
    """Draws and injects the faults of one simulation."""

    def __init__(self, faults: Sequence[FaultConfig], seed: int, events: Events) -> None:
        self._faults = faults
        self._rng = generator(seed, "faults")
        self._events = events

    def should_fail(self, point: str) -> bool:
        """Return True if a fault hits this call."""
        return any(self._draw_fault(fault) for fault in self._faults if fault.point == point)

    def slow_factor(self, point: str) -> float:
        """Return the factor on the time of this call."""
        return math.prod(fault.factor for fault in self._faults if fault.point == point and self._draw_fault(fault))

    async def inject(self, engines: Callable[[], Sequence[SimulatedEngine]]) -> None:
        """Make engines crash, hang and be slow at the faults' times; runs until it is cancelled."""
        async with asyncio.TaskGroup() as owner:
            for fault in self._faults:
                if fault.point in TIMED:
                    owner.create_task(self._inject_repeatedly(fault, engines), name=fault.point)

    async def _inject_repeatedly(self, fault: FaultConfig, engines: Callable[[], Sequence[SimulatedEngine]]) -> None:
        await asyncio.sleep(fault.at)
        while living := [engine for engine in engines() if engine.dead is None]:
            engine = living[int(self._rng.integers(len(living)))]
            self._events.add("fault", point=fault.point)
            match fault.point:
                case "engine.crash":
                    engine.crash()
                case "engine.hang":
                    engine.hang()
                case _:
                    engine.slow_down(fault.factor)
                    if fault.seconds < math.inf:
                        asyncio.get_running_loop().call_later(fault.seconds, engine.recover)
            if fault.every == math.inf:
                return
            await asyncio.sleep(self._rng.exponential(fault.every))

    def _draw_fault(self, fault: FaultConfig) -> bool:
        is_hit = bool(self._rng.random() < fault.chance)
        if is_hit:
            self._events.add("fault", point=fault.point)
        return is_hit
