"""What goes wrong in a simulation: faults at named points, when they are due or by chance, drawn from the run's seed."""

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
    """Where: crash, hang and slow affect one engine, drawn anew each time; the others what is called just then."""
    at: float = Field(0.0, ge=0.0)
    """Of crash, hang and slow: the second of the first time."""
    every: float = Field(math.inf, gt=0.0)
    """Of these three: seconds to the next time, in the mean of an exponential distribution."""
    chance: float = Field(0.0, ge=0.0, le=1.0)
    """Of the others: the probability at each call."""
    factor: float = Field(10.0, ge=1.0)
    """What is slow takes so many times as long."""
    seconds: float = Field(math.inf, gt=0.0)
    """How long an engine is slow."""

    @model_validator(mode="after")
    def _whole(self) -> "FaultConfig":
        if self.point in TIMED and self.chance:
            raise ValueError(f"{self.point} happens in time (at, every), not by chance")
        if self.point not in TIMED and not self.chance:
            raise ValueError(f"{self.point} happens by chance: give it one")
        return self


class Faults:
    """The faults of one simulation."""

    def __init__(self, faults: Sequence[FaultConfig], seed: int, events: Events) -> None:
        self._faults = faults
        self._draw = generator(seed, "faults")
        self._events = events

    def should_fail(self, point: str) -> bool:
        """Whether a fault befalls this call."""
        return any(self._happens(fault) for fault in self._faults if fault.point == point)

    def slow_factor(self, point: str) -> float:
        """How many times as long this takes."""
        return math.prod(fault.factor for fault in self._faults if fault.point == point and self._happens(fault))

    async def inject(self, engines: Callable[[], Sequence[SimulatedEngine]]) -> None:
        """Let engines crash, hang and be slow when it is time; runs until it is cancelled."""
        async with asyncio.TaskGroup() as owner:
            for fault in self._faults:
                if fault.point in TIMED:
                    owner.create_task(self._repeat(fault, engines), name=fault.point)

    async def _repeat(self, fault: FaultConfig, engines: Callable[[], Sequence[SimulatedEngine]]) -> None:
        await asyncio.sleep(fault.at)
        while living := [engine for engine in engines() if engine.dead is None]:
            engine = living[int(self._draw.integers(len(living)))]
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
            await asyncio.sleep(self._draw.exponential(fault.every))

    def _happens(self, fault: FaultConfig) -> bool:
        happens = bool(self._draw.random() < fault.chance)
        if happens:
            self._events.add("fault", point=fault.point)
        return happens
