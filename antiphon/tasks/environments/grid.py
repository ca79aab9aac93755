"""What games on a grid share: four directions in words, and a board in text."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from antiphon.tasks.environments.actions import extract_answer, match_action
from antiphon.tasks.environments.options import require, require_whole
from antiphon.tasks.environments.turns import TurnBasedGame

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
class GridGame(TurnBasedGame):
    """A game on a board, in which the policy moves one cell at a time.

    An action says one direction, or several with commas between. If any of it cannot be read, or there are more than
    `most_actions`, none of it is done.
    """

    words: Words = field(default_factory=lambda: {each: each.capitalize() for each in DIRECTIONS})
    """What the directions are called: a mapping, or words or letters for up, down, left, right."""
    symbols: Mapping[str, str] = field(default_factory=dict)
    """What cells look like, where that is not as in `SYMBOLS`."""
    most_actions: int = 1
    """Directions in one turn; a game that ends leaves the rest of them undone."""
    row_separator: str = "\n"
    column_separator: str = ""

    SYMBOLS: ClassVar[Mapping[str, str]]
    """Of each thing that a cell can show, one character; also those of `state_key`, whatever is shown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole(self.NAME, "most_actions", self.most_actions, 1)
        self._words = direction_words(self.NAME, self.words)
        self._by_word = {word: direction for direction, word in self._words.items()}
        shown = {**self.SYMBOLS, **self.symbols}
        kept = set(shown) == set(self.SYMBOLS) and len(set(shown.values())) == len(shown)
        kept = kept and len({len(str(symbol)) for symbol in shown.values()} - {0}) == 1
        valid = f"different symbols of one length for any of {', '.join(self.SYMBOLS)}"
        require(kept, self.NAME, "symbols", dict(self.symbols), valid)
        self._shown = {character: str(shown[thing]) for thing, character in self.SYMBOLS.items()}

    def actions(self) -> Sequence[str]:
        """The words for the directions: all can be said at any time."""
        return tuple(self._by_word)

    def _act(self, action: str) -> float | None:
        directions, reward = self._read(action), 0.0
        for direction in directions:
            reward += self._move(direction)
            if self._won() or self._lost():
                break
        return reward if directions else None

    def _read(self, action: str) -> list[str]:
        """Directions; none if any part of the action is not one of the words, or there are too many."""
        parts = [
            match_action(part, self._by_word) for part in extract_answer(action).split(",", maxsplit=self.most_actions)
        ]
        readable = [self._by_word[word] for word in parts if word is not None]
        return readable if len(readable) == len(parts) <= self.most_actions else []

    def _choice(self) -> str:
        several = f", or up to {self.most_actions} of them, separated by commas" if self.most_actions > 1 else ""
        return f"Say one of {', '.join(self._by_word)}{several}."

    def _rules(self) -> str:
        signs = ", ".join(f"{self._shown[sign]} {thing}" for thing, sign in self.SYMBOLS.items())
        return f"{self._aim()}\nSigns: {signs}."

    def _text(self) -> str:
        return self.row_separator.join(
            self.column_separator.join(map(self._shown.__getitem__, r)) for r in self._rows()
        )

    def _key(self) -> str:
        return "\n".join(self._rows())

    def _best(self) -> str:
        return self._words[self._way()]

    @abstractmethod
    def _aim(self) -> str:
        """What the game is about, in a sentence or two."""

    @abstractmethod
    def _rows(self) -> list[str]:
        """The board, in characters of `SYMBOLS`."""

    @abstractmethod
    def _move(self, direction: str) -> float:
        """Try to move one cell; return the reward."""

    @abstractmethod
    def _way(self) -> str:
        """The direction to take now."""
