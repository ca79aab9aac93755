"""Adapter to TextArena."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from antiphon.core.registry import import_path
from antiphon.core.rng import generator
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.adapters.base import Adapter, LibraryConfig, make_or_explain
from antiphon.tasks.environments.adapters.global_random import SEEDS, GlobalRandom
from antiphon.tasks.environments.base import require

Opponent = Callable[[str, np.random.Generator], str]  # from observation and random generator to action


class TextArena(Adapter):
    """A game of TextArena, in which the policy plays one seat and `opponent` all others.

    The reward is what the game gives to the policy's seat at its end. Where observations repeat earlier ones, the policy sees
    only the new part.
    """

    class Config(LibraryConfig):
        """Options of `textarena`."""

        players: int = Field(1, ge=1)
        seat: int = Field(0, ge=0)
        """Number of the policy among the players."""
        opponent: str | None = None
        """package.module:function that maps an observation and a random generator to an action."""

        @model_validator(mode="after")
        def _check(self) -> Self:
            require(self.seat < self.players, "seat", self.seat, f"a whole number from 0 to {self.players - 1}")
            valid = "package.module:function" if self.players > 1 else "left out: there is one player"
            require((self.opponent is not None) == (self.players > 1), "opponent", self.opponent, valid)
            return self

    config: Config
    name: ClassVar[str] = "textarena"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        textarena, config = self._import("textarena", "textarena"), self.config
        self._opponent: Opponent | None = import_path(config.opponent, "opponent") if config.opponent else None
        self._random, self._opponent_random = GlobalRandom(0), generator(0)
        with self._random():
            self._inner = make_or_explain(
                self.name, config.id, config.options, lambda: textarena.make(config.id, **config.options)
            )
        self._seen = ""

    def reset(self, seed: int) -> Reset:
        """Begin a game, and let opponents act who come before the policy."""
        self._random, self._opponent_random = GlobalRandom(seed), generator(seed, "textarena", "opponent")
        with self._random():
            self._inner.reset(num_players=self.config.players, seed=seed % SEEDS)
            _, text = self._play_opponents()
        return text, self._reset_info(text)

    def step(self, action: str) -> Step:
        """Pass an action to the library, and let opponents act until it is the policy's turn again."""
        with self._random():
            over, _ = self._inner.step(action)
            over, text = (True, "") if over else self._play_opponents()
            reward = 0.0
            if over:
                rewards, about = self._inner.close()
                seat = self.config.seat
                reward, text = float((rewards or {}).get(seat, 0.0)), str(about[seat].get("reason") or "")
        return text, reward, over, False, self._step_info(action, text, reward, over)

    def _play_opponents(self) -> tuple[bool, str]:
        """Let opponents act; return True if that ended the game, and the new part of the observation."""
        while True:
            player, observation = self._inner.get_observation()
            is_text = isinstance(observation, str)
            text = observation if is_text else "\n".join(str(message[1]) for message in observation)
            if player == self.config.seat or self._opponent is None:
                fresh = text[len(self._seen) :] if text.startswith(self._seen) else text
                self._seen = text
                return False, fresh.strip()
            if self._inner.step(self._opponent(text, self._opponent_random))[0]:
                return True, ""
