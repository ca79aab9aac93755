"""Environments that take their time, for `environment_async.py`."""

import asyncio
from collections.abc import Iterator
from typing import Any

from antiphon.seeds import generator


def problems(split: str) -> Iterator[dict[str, str]]:
    """Nothing is asked."""
    for number in range(100_000):
        yield {"id": f"{split}-{number}", "prompt": "0"}


class Crowd:
    """Worlds that are stepped as one: a turn has ended when all that play have ended theirs."""

    def __init__(self) -> None:
        self._playing = self._arrived = 0
        self._ended = asyncio.Event()

    def change(self, by: int) -> None:
        """So many worlds more play."""
        self._playing += by
        self._look()

    async def wait(self) -> None:
        """Return when all have come so far."""
        ended = self._ended
        self._arrived += 1
        self._look()
        await ended.wait()

    def _look(self) -> None:
        if self._arrived and self._arrived >= self._playing:
            self._arrived = 0
            self._ended.set()
            self._ended = asyncio.Event()


class Sleepy:
    """A world of `turns`, each of which takes N(`mean`, `spread`) seconds, cut at 0. Some attempts are unlucky: each turn takes
    `slow` times as long (fail-slow), or one never ends (fail-stop).

    With `together` worlds are stepped as one, as a vectorised environment is.
    """

    _crowd = Crowd()
    _made = 0

    def __init__(
        self,
        mean: float,
        spread: float,
        turns: int = 20,
        together: bool = False,
        slow: float = 10.0,
        slow_share: float = 0.0,
        stop_share: float = 0.0,
    ) -> None:
        self._mean, self._spread, self._turns, self._slow = mean, spread, turns, slow
        self._shares = slow_share, stop_share
        self._together = together
        Sleepy._made += 1
        self._number = Sleepy._made  # an attempt that is tried again has other luck

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin."""
        luck = generator(seed, "sleepy", self._number)
        self._seconds = luck.normal(self._mean, self._spread, self._turns).clip(0)
        slow, stop = luck.random(2) < self._shares
        if slow:
            self._seconds *= self._slow
        if stop:
            self._seconds[luck.integers(self._turns)] = 1e9
        self._turn = 0
        self._crowd.change(+1)
        return "0", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Wait."""
        await asyncio.sleep(self._seconds[self._turn])
        self._turn += 1
        if self._together:
            await self._crowd.wait()
        return "0", 0.0, self._turn == self._turns, False, {}

    async def close(self) -> None:
        """Leave the others."""
        self._crowd.change(-1)


def anything(prompt: Any, transcript: Any) -> float:
    """A reward that varies among siblings."""
    return float(sum(map(len, (message.content for message in transcript.messages))) % 2)
