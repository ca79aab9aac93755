"""Environments that take their time, for `environment_async.py`."""

import asyncio
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from antiphon.core.rng import generator
from antiphon.core.types import Prompt
from antiphon.learning.model.tiny import make_tokenizer, write_tiny_model
from antiphon.simulate.workloads import DistributionConfig
from antiphon.tasks.base import Reset, Step, Transcript
from antiphon_envs.alfworld.environment import AlfWorld
from antiphon_envs.alfworld.state import NOTHING

LISTED = "\n\nYou can:"  # what follows names the letters; the policy is not shown it
PLACE = {"task_types": ["look_in_light"], "receptacles": 4, "objects": 3, "commands": "lettered"}


def build(directory: Path | str, seed: int = 0) -> None:
    """A model for a household: 0.2 million parameters that read and write characters."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n", "\n\n"]
    write_tiny_model(directory, seed, make_tokenizer(characters, r"\n+|."), hidden_size=64, layers=2)


def problems(split: str) -> Iterator[dict[str, str]]:
    """Nothing is asked."""
    for number in range(5_000):
        yield {"id": f"{split}-{number}", "prompt": ""}


def sayings(split: str) -> Iterator[dict[str, str]]:
    """Households, and something that may be done there: so that a policy says letters, whichever."""
    for number in range(2_000):
        household = AlfWorld(**PLACE)
        observation, _ = household.reset(number)
        action = str(generator(number, "saying").choice(list(household.actions())))
        yield {"id": f"{split}-{number}", "prompt": observation.partition(LISTED)[0], "response": action}


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


class Pace:
    """How long the turns of a world take. Each is drawn from `seconds`, a `DistributionConfig`. Some attempts are unlucky: each
    turn takes `slow` times as long (fail-slow), or one never ends (fail-stop).

    With `together` worlds are stepped as one, as a vectorised environment is.
    """

    _crowd = Crowd()
    _made = 0

    def __init__(
        self,
        turns: int,
        seconds: dict[str, Any],
        together: bool = False,
        slow: float = 10.0,
        slow_share: float = 0.0,
        stop_share: float = 0.0,
    ) -> None:
        self._turns, self._together, self._slow = turns, together, slow
        self._distribution = DistributionConfig(**seconds)
        self._shares = slow_share, stop_share
        Pace._made += 1
        self._number = Pace._made  # an attempt that is tried again has other luck

    def begin(self, seed: int) -> None:
        """Draw what its turns will take."""
        luck = generator(seed, "pace", self._number)
        seconds = [self._distribution.draw(seed, "turn", self._number, turn) for turn in range(self._turns)]
        slow, stop = luck.random(2) < self._shares
        if slow:
            seconds = [self._slow * each for each in seconds]
        if stop:
            seconds[luck.integers(self._turns)] = 1e9
        self._seconds = iter(seconds)
        self._crowd.change(+1)

    async def turn(self) -> None:
        """Take a turn's time."""
        await asyncio.sleep(next(self._seconds))
        if self._together:
            await self._crowd.wait()

    def end(self) -> None:
        """Leave the others."""
        self._crowd.change(-1)


class Sleepy:
    """A world of so many turns in which nothing happens."""

    def __init__(self, turns: int = 20, **pace: Any) -> None:
        self._left, self._pace = turns, Pace(turns, **pace)

    async def reset(self, seed: int) -> Reset:
        """Begin."""
        self._pace.begin(seed)
        return "0", {}

    async def step(self, action: str) -> Step:
        """Wait."""
        await self._pace.turn()
        self._left -= 1
        return "0", 0.0, not self._left, False, {}

    async def close(self) -> None:
        """Leave the others."""
        self._pace.end()


class Household:
    """The environment `alfworld`, slowly. What may be done has a letter, and is not listed."""

    def __init__(self, turns: int = 20, **pace: Any) -> None:
        self._world, self._pace = AlfWorld(turns=turns, **PLACE), Pace(turns, **pace)

    async def reset(self, seed: int) -> Reset:
        """Begin."""
        self._pace.begin(seed)
        observation, info = self._world.reset(seed)
        return observation.partition(LISTED)[0], info

    async def step(self, action: str) -> Step:
        """Wait, and do it."""
        await self._pace.turn()
        observation, *rest = self._world.step(action)
        return f"\n{observation.partition(LISTED)[0]}\n", *rest

    async def close(self) -> None:
        """Leave the others."""
        self._pace.end()


def progress(prompt: Prompt, transcript: Transcript) -> float:
    """1 for a task that is done, else half the share of commands that did something: there is always something to learn."""
    if transcript.turns[-1].reward:
        return 1.0
    answers = [message.content.strip() for message in transcript.messages if message.role == "user"][2:]
    return 0.5 * sum(answer != NOTHING for answer in answers) / max(1, len(answers))


def anything(prompt: Prompt, transcript: Transcript) -> float:
    """A reward that varies among siblings."""
    return float(sum(map(len, (message.content for message in transcript.messages))) % 2)
