"""What games on a grid share: four directions in words, a board in text, and turns that are counted."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.actions import chosen, said
from antiphon.tasks.environments.options import require, require_number, require_whole

DIRECTIONS = ("up", "down", "left", "right")


Words = Mapping[str, str] | Sequence[str]


def direction_words(environment: str, words: Words) -> dict[str, str]:
    """The word for each direction, from a mapping or from four words or letters in the order of `DIRECTIONS`.

    >>> direction_words("sokoban", "UDLR")["left"]
    'L'
    """
    named = dict(words if isinstance(words, Mapping) else zip(DIRECTIONS, words, strict=False))
    distinct = {str(word).strip().casefold() for word in named.values()} - {""}
    kept = set(named) == set(DIRECTIONS) and len(words) == len(distinct) == len(DIRECTIONS)
    kept = kept and not any("," in str(word) for word in named.values())
    valid = f"four different words for {', '.join(DIRECTIONS)}: in this order, or a mapping of these; no commas in them"
    require(kept, environment, "words", words, valid)
    return {direction: str(word).strip() for direction, word in named.items()}


@dataclass(kw_only=True, eq=False)
class GridGame(ABC):
    """A game whose whole state is a board that the policy sees, and in which it moves one cell at a time.

    A turn is one call of `step`. What cannot be read, or holds more than `most_actions` directions, does nothing, and costs
    the turn and `format_penalty`. Games end with `terminated` when they are won or lost, with `truncated` after the last turn.
    """

    words: Words = field(default_factory=lambda: {each: each.capitalize() for each in DIRECTIONS})
    """What the directions are called: a mapping, or words or letters for up, down, left, right."""
    symbols: Mapping[str, str] = field(default_factory=dict)
    """What cells look like, where that is not as in `SYMBOLS`."""
    turns: int = 30
    most_actions: int = 1
    """Directions in one turn, separated by commas; a game that ends leaves the rest of them undone."""
    format_penalty: float = 0.0
    """What an action that cannot be read costs."""
    instructions: bool = True
    """Whether the first observation has the rules, and others say what was wrong; otherwise they are boards and no more."""
    row_separator: str = "\n"
    column_separator: str = ""

    NAME: ClassVar[str]
    SYMBOLS: ClassVar[Mapping[str, str]]
    """Of each thing that a cell can show, one character; also those of `state_key`, whatever is shown."""

    def __post_init__(self) -> None:
        require_whole(self.NAME, "turns", self.turns, 1)
        require_whole(self.NAME, "most_actions", self.most_actions, 1)
        require_number(self.NAME, "format_penalty", self.format_penalty, 0)
        self._words = direction_words(self.NAME, self.words)
        self._by_word = {word: direction for direction, word in self._words.items()}
        shown = {**self.SYMBOLS, **self.symbols}
        kept = set(shown) == set(self.SYMBOLS) and len(set(shown.values())) == len(shown)
        kept = kept and len({len(str(symbol)) for symbol in shown.values()} - {0}) == 1
        valid = f"different symbols of one length for any of {', '.join(self.SYMBOLS)}"
        require(kept, self.NAME, "symbols", dict(self.symbols), valid)
        self._shown = {character: str(shown[thing]) for thing, character in self.SYMBOLS.items()}
        self._left = 0  # turns; none before the game begins

    def reset(self, seed: int) -> Reset:
        """Begin; the board depends on `seed` and options only."""
        self._begin(seed)
        self._left = self.turns
        rules = f"{self._rules()}\n{self._legend()}\n\n" if self.instructions else ""
        return rules + self._text(), {"state_key": self._key(), "valid": True, "effective": False}

    def step(self, action: str) -> Step:
        """Move in the directions that `action` says."""
        self._check_playing()
        directions = self._read(action)
        before, reward = self._key(), 0.0 if directions else 0.0 - self.format_penalty
        for direction in directions:
            reward += self._move(direction)
            if self._ended():
                break
        key, ended = self._key(), self._ended()
        self._left = 0 if ended else self._left - 1
        info: dict[str, Any] = {"state_key": key, "valid": bool(directions), "effective": key != before}
        if not self._left:
            info["success"] = self._won()
        wrong = "" if directions or not self.instructions else f"That cannot be done. {self._choice()}\n\n"
        return wrong + self._text(), reward, ended, not ended and not self._left, info

    def close(self) -> None:  # noqa: B027 - no game has anything to add
        """Nothing is held."""

    def actions(self) -> Sequence[str]:
        """The words for the directions: all can be said at any time."""
        return tuple(self._by_word)

    def expert(self) -> str:
        """The best that can be said now; anything if all is lost."""
        self._check_playing()
        return self._words[self._best()]

    def _check_playing(self) -> None:
        if not self._left:
            raise RuntimeError("the game is over, or was never begun: call reset first")

    def _read(self, action: str) -> list[str]:
        """Directions; none if any part of the action is not one of the words, or there are too many."""
        parts = [chosen(part, self._by_word) for part in said(action).split(",", maxsplit=self.most_actions)]
        readable = [self._by_word[word] for word in parts if word is not None]
        return readable if len(readable) == len(parts) <= self.most_actions else []

    def _choice(self) -> str:
        several = f", or up to {self.most_actions} of them, separated by commas" if self.most_actions > 1 else ""
        return f"Say one of {', '.join(self._by_word)}{several}."

    def _legend(self) -> str:
        signs = ", ".join(f"{self._shown[sign]} {thing}" for thing, sign in self.SYMBOLS.items())
        return f"Signs: {signs}. {self._choice()} You have {self.turns} turns."

    def _text(self) -> str:
        """The board as the policy sees it."""
        return self.row_separator.join(
            self.column_separator.join(map(self._shown.__getitem__, r)) for r in self._rows()
        )

    def _key(self) -> str:
        return "\n".join(self._rows())

    def _ended(self) -> bool:
        return self._won() or self._lost()

    @abstractmethod
    def _begin(self, seed: int) -> None:
        """Draw the board."""

    @abstractmethod
    def _rules(self) -> str:
        """What the game is about, in a sentence or two."""

    @abstractmethod
    def _rows(self) -> list[str]:
        """The board, in characters of `SYMBOLS`."""

    @abstractmethod
    def _move(self, direction: str) -> float:
        """Try to move one cell; return the reward."""

    @abstractmethod
    def _won(self) -> bool: ...

    def _lost(self) -> bool:
        return False

    @abstractmethod
    def _best(self) -> str:
        """The direction to take now."""
