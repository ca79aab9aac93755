"""What games of turns share: they are counted, what cannot be read is worth a penalty, and the state has a name."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.options import require_number, require_whole


@dataclass(kw_only=True, eq=False)
class TurnBasedGame(ABC):
    """A game whose whole state the policy sees. A turn is one call of `step`.

    What cannot be read or is not allowed does nothing, and costs the turn and `format_penalty`. Games end with `terminated`
    when they are won or lost, with `truncated` after the last turn. `info["state_key"]` names the state, but for the turns
    that are left: who comes back to a state later finds the same key, as GiGPO (Feng et al. 2025) has it.
    """

    turns: int = 30
    format_penalty: float = 0.0
    """What an action that cannot be read or is not allowed costs."""
    instructions: bool = True
    """Whether the first observation has the rules, and others say what was wrong; otherwise they are states and no more."""

    NAME: ClassVar[str]
    inline: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_whole(self.NAME, "turns", self.turns, 1)
        require_number(self.NAME, "format_penalty", self.format_penalty, 0)
        self._left = 0  # turns; none before the game begins
        self._before = ""  # the key of the state that the next action is taken in

    def reset(self, seed: int) -> Reset:
        """Begin; the game depends on `seed` and options only."""
        self._begin(seed)
        self._left, self._before = self.turns, self._key()
        rules = f"{self._rules()}\n{self._choice()} You have {self.turns} turns.\n\n" if self.instructions else ""
        return rules + self._text(), {"state_key": self._before, "valid": True, "effective": False}

    def step(self, action: str) -> Step:
        """Do what `action` says."""
        self._check_playing()
        before, reward = self._before, self._act(action)
        key = self._before = self._key()
        ended, valid = self._won() or self._lost(), reward is not None
        self._left = 0 if ended else self._left - 1
        info: dict[str, Any] = {"state_key": key, "valid": valid, "effective": key != before}
        if not self._left:
            info["success"] = self._won()
        wrong = "" if valid or not self.instructions else f"That cannot be done. {self._choice()}\n\n"
        worth = 0.0 - self.format_penalty if reward is None else reward
        return wrong + self._text(), worth, ended, not ended and not self._left, info

    def close(self) -> None:  # noqa: B027 - no game has anything to add
        """Nothing is held."""

    @abstractmethod
    def actions(self) -> Sequence[str]:
        """What may be said now."""

    def expert(self) -> str:
        """The best that can be said now; anything if all is lost."""
        self._check_playing()
        return self._best()

    def _check_playing(self) -> None:
        if not self._left:
            raise RuntimeError("the game is over, or was never begun: call reset first")

    @abstractmethod
    def _begin(self, seed: int) -> None:
        """Draw the game."""

    @abstractmethod
    def _rules(self) -> str:
        """What the game is about."""

    @abstractmethod
    def _choice(self) -> str:
        """What may be said, in a sentence."""

    @abstractmethod
    def _act(self, action: str) -> float | None:
        """Do what `action` says and return the reward; None if it cannot be read or is not allowed."""

    @abstractmethod
    def _text(self) -> str:
        """The state as the policy sees it."""

    @abstractmethod
    def _key(self) -> str:
        """The name of the state: equal for equal states, and for no others."""

    @abstractmethod
    def _won(self) -> bool: ...

    def _lost(self) -> bool:
        return False

    @abstractmethod
    def _best(self) -> str:
        """See `expert`."""
