"""The base of turn-based games: turns are counted, an unreadable action costs a penalty, and every state has a key."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.base import BaseEnvironment, EnvironmentConfig


class TurnBasedGame(BaseEnvironment):
    """A fully observed game of which each call of `step` is one turn.

    An action that cannot be read or is not allowed changes nothing and costs the turn and `format_penalty`. A game that is
    won or lost ends with `terminated`; one that runs out of turns with `truncated`. `info["state_key"]` names the state
    without the turns that are left, so a policy that returns to a state finds the same key, as GiGPO (Feng et al. 2025) needs.
    """

    class Config(EnvironmentConfig):
        """Options that all turn-based games have."""

        turns: int = Field(30, ge=1)
        """Turns after which the episode is truncated."""
        format_penalty: float = Field(0.0, ge=0)
        """Cost of an action that cannot be read or is not allowed."""
        instructions: bool = True
        """Put the rules into the first observation and explain rejected actions; without, observations are bare states."""

    config: Config
    inline: ClassVar[bool] = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._last_key = ""  # of the state that the next action is taken in

    def reset(self, seed: int) -> Reset:
        """Begin a game that depends on `seed` and the options only."""
        self._start(seed)
        self._turns_left, self._last_key = self.config.turns, self._state_key()
        rules = f"{self._rules()}\n{self._describe_actions()} You have {self.config.turns} turns.\n\n"
        observation = (rules if self.config.instructions else "") + self._render()
        return observation, {"state_key": self._last_key, "valid": True, "effective": False}

    def step(self, action: str) -> Step:
        """Apply an action."""
        self._check_running()
        before, reward = self._last_key, self._apply(action)
        key = self._last_key = self._state_key()
        ended, valid = self._is_won() or self._is_lost(), reward is not None
        self._turns_left = 0 if ended else self._turns_left - 1
        info: dict[str, Any] = {"state_key": key, "valid": valid, "effective": key != before}
        if not self._turns_left:
            info["success"] = self._is_won()
        rejected = (
            "" if valid or not self.config.instructions else f"That cannot be done. {self._describe_actions()}\n\n"
        )
        paid = 0.0 - self.config.format_penalty if reward is None else reward
        return rejected + self._render(), paid, ended, not ended and not self._turns_left, info

    @abstractmethod
    def actions(self) -> Sequence[str]:
        """Return the actions that are allowed now."""

    def expert(self) -> str:
        """Return the best action; any action if the game cannot be won any more."""
        self._check_running()
        return self._expert_action()

    @abstractmethod
    def _start(self, seed: int) -> None:
        """Draw a game."""

    @abstractmethod
    def _rules(self) -> str:
        """Return the rules of the game."""

    @abstractmethod
    def _describe_actions(self) -> str:
        """Return one sentence about the allowed actions."""

    @abstractmethod
    def _apply(self, action: str) -> float | None:
        """Apply an action and return its reward; None if it cannot be read or is not allowed."""

    @abstractmethod
    def _render(self) -> str:
        """Return the state as the policy sees it."""

    @abstractmethod
    def _state_key(self) -> str:
        """Return the key of the state: equal for equal states only."""

    @abstractmethod
    def _is_won(self) -> bool: ...

    def _is_lost(self) -> bool:
        return False

    @abstractmethod
    def _expert_action(self) -> str:
        """Return the best action of a running game."""
