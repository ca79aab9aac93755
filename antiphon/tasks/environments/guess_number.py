"""The smallest environment with a second turn: find a number from the answers `higher` and `lower`."""

import re
from typing import Any, ClassVar

from pydantic import Field

from antiphon.core.rng import generator
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.base import BaseEnvironment, EnvironmentConfig

LONGEST_GUESS = 18  # digits that are read of a guess: longer ones are too high anyway


class GuessNumber(BaseEnvironment):
    """Guess a number from 1 to `highest`; each wrong guess but the last is answered `higher` or `lower`.

    The right guess earns 1 and ends the game, as does the last of `guesses`. Any other guess earns its closeness, scaled to at
    most `closeness`; an action without a number earns 0. `info["state_key"]` names what the player knows, not the number: two
    games with the same key are the same to the player.
    """

    class Config(EnvironmentConfig):
        """Options of `guess_number`."""

        highest: int = Field(9, ge=1)
        guesses: int = Field(2, ge=1)
        closeness: float = 0.1
        """Reward of a wrong guess at distance 0."""

    config: Config
    name: ClassVar[str] = "guess_number"
    inline: ClassVar[bool] = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._secret = 0  # before the first game
        self._bounds = (1, self.config.highest)  # that the answers leave for the number

    def reset(self, seed: int) -> Reset:
        """Begin a game; the number depends on `seed` only."""
        highest = self.config.highest
        self._secret = int(generator(seed, self.name).integers(1, highest, endpoint=True))
        self._turns_left = self.config.guesses
        self._bounds = (1, highest)
        return f"Guess a number from 1 to {highest}.", self._info()

    def step(self, action: str) -> Step:
        """Guess the first whole number in `action`."""
        self._check_running()
        self._turns_left -= 1
        found = re.search(r"\d+", action)
        guess = int(found[0][:LONGEST_GUESS]) if found else None
        if guess == self._secret:
            self._turns_left = 0
            return "right", 1.0, True, False, self._info()
        if guess is None:
            return self._answer("not a number", 0.0)
        self._narrow_bounds(guess)
        distance = min(abs(guess - self._secret) / self.config.highest, 1.0)
        reward = self.config.closeness * (1.0 - distance)
        return self._answer("higher" if guess < self._secret else "lower", reward)

    def _answer(self, observation: str, reward: float) -> Step:
        return observation, reward, not self._turns_left, False, self._info()

    def _narrow_bounds(self, guess: int) -> None:
        low, high = self._bounds
        self._bounds = (max(low, guess + 1), high) if guess < self._secret else (low, min(high, guess - 1))

    def _info(self) -> dict[str, Any]:
        return {"state_key": f"{self._bounds[0]}-{self._bounds[1]}/{self._turns_left}"}
