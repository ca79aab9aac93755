"""The smallest world with a second turn: find a number that is told to be higher or lower."""

import re
from typing import Any

from antiphon.core.rng import generator
from antiphon.tasks.environments.options import require_whole

Step = tuple[str, float, bool, bool, dict[str, Any]]


class GuessNumber:
    """Think of a number from 1 to `highest`; each guess but the last is answered `higher` or `lower`.

    A right guess is worth 1 and ends the game, as does the last of `guesses`. Any other guess is worth its closeness,
    up to `closeness`; an action without a number is worth 0. `info["state_key"]` names what the player knows now, not
    the number: two games with the same key are the same to the player.
    """

    inline = True

    def __init__(self, highest: int = 9, guesses: int = 2, closeness: float = 0.1) -> None:
        require_whole("guess_number", "highest", highest, 1)
        require_whole("guess_number", "guesses", guesses, 1)
        self._highest = highest
        self._guesses = guesses
        self._closeness = closeness
        self._secret = self._left = 0  # no game
        self._known = (1, highest)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin; the number depends on `seed` only."""
        self._secret = int(generator(seed, "guess_number").integers(1, self._highest, endpoint=True))
        self._left = self._guesses
        self._known = (1, self._highest)
        return f"Guess a number from 1 to {self._highest}.", self._info()

    def step(self, action: str) -> Step:
        """Guess: the first whole number in `action` counts."""
        if not self._secret or not self._left:
            raise RuntimeError("the game is over, or was never begun: call reset first")
        self._left -= 1
        found = re.search(r"\d+", action)
        guess = int(found[0][:18]) if found else None  # long strings of digits are cut: all of them are too high
        if guess == self._secret:
            self._left = 0
            return "right", 1.0, True, False, self._info()
        if guess is None:
            return self._answer("not a number", 0.0)
        self._learn(guess)
        distance = min(abs(guess - self._secret) / self._highest, 1.0)
        return self._answer("higher" if guess < self._secret else "lower", self._closeness * (1.0 - distance))

    def close(self) -> None:
        """Nothing is held."""

    def _answer(self, observation: str, reward: float) -> Step:
        return observation, reward, not self._left, False, self._info()

    def _learn(self, guess: int) -> None:
        low, high = self._known
        self._known = (max(low, guess + 1), high) if guess < self._secret else (low, min(high, guess - 1))

    def _info(self) -> dict[str, Any]:
        return {"state_key": f"{self._known[0]}-{self._known[1]}/{self._left}"}
