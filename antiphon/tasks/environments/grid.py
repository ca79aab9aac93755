"""The base of games on a grid: four directions in words, and a board in text."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, field_validator

from antiphon.tasks.environments.actions import extract_answer, match_action
from antiphon.tasks.environments.base import require
from antiphon.tasks.environments.turns import TurnBasedGame

DIRECTIONS = ("up", "down", "left", "right")


def direction_words(words: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Return the word for each direction, given as a mapping or in the order of `DIRECTIONS`.

    >>> direction_words("UDLR")["left"]
    'L'
    """
    valid = f"four different words for {', '.join(DIRECTIONS)}: in this order, or a mapping of these; no commas in them"
    require(isinstance(words, Mapping | Sequence), "words", words, valid)
    named = dict(words if isinstance(words, Mapping) else zip(DIRECTIONS, words, strict=False))
    distinct = {str(word).strip().casefold() for word in named.values()} - {""}
    complete = set(named) == set(DIRECTIONS) and len(words) == len(distinct) == len(DIRECTIONS)
    require(complete and not any("," in str(word) for word in named.values()), "words", words, valid)
    return {direction: str(word).strip() for direction, word in named.items()}


def _as_text(symbols: Any) -> Any:
    """Write numbers among symbols as text."""
    return {thing: str(symbol) for thing, symbol in symbols.items()} if isinstance(symbols, Mapping) else symbols


class GridGame(TurnBasedGame):
    """A game on a board, in which the policy moves one cell at a time.

    An action is one direction, or several separated by commas. If a part of it cannot be read, or there are more than
    `most_actions`, none of it is applied.
    """

    class Config(TurnBasedGame.Config):
        """Options that all games on a grid have."""

        SYMBOLS: ClassVar[Mapping[str, str]] = {}
        """One character for each thing that a cell can show; `state_key` uses them whatever the board shows."""

        words: Annotated[Mapping[str, str], BeforeValidator(direction_words)] = Field(
            default_factory=lambda: {each: each.capitalize() for each in DIRECTIONS}
        )
        """Words for the directions: a mapping, or words or letters for up, down, left, right."""
        symbols: Annotated[Mapping[str, str], BeforeValidator(_as_text)] = {}
        """Symbols of cells that differ from `SYMBOLS`."""
        most_actions: int = Field(1, ge=1)
        """Directions allowed in one turn; the rest is dropped when the game ends."""
        row_separator: str = "\n"
        column_separator: str = ""

        @field_validator("symbols")
        @classmethod
        def _check_symbols(cls, symbols: Mapping[str, str]) -> Mapping[str, str]:
            shown = {**cls.SYMBOLS, **symbols}
            distinct = set(shown) == set(cls.SYMBOLS) and len(set(shown.values())) == len(shown)
            one_length = len({len(symbol) for symbol in shown.values()} - {0}) == 1
            valid = f"different symbols of one length for any of {', '.join(cls.SYMBOLS)}"
            require(distinct and one_length, "symbols", dict(symbols), valid)
            return symbols

    config: Config

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._by_word = {word: direction for direction, word in self.config.words.items()}
        shown = {**self.config.SYMBOLS, **self.config.symbols}
        self._shown = {character: shown[thing] for thing, character in self.config.SYMBOLS.items()}

    def actions(self) -> Sequence[str]:
        """Return the words for the directions: all are allowed at any time."""
        return tuple(self._by_word)

    def _apply(self, action: str) -> float | None:
        directions, reward = self._read_directions(action), 0.0
        for direction in directions:
            reward += self._move(direction)
            if self._is_won() or self._is_lost():
                break
        return reward if directions else None

    def _read_directions(self, action: str) -> list[str]:
        """Return the directions; none if a part of the action is no word for one, or there are too many."""
        most = self.config.most_actions
        parts = [match_action(part, self._by_word) for part in extract_answer(action).split(",", maxsplit=most)]
        readable = [self._by_word[word] for word in parts if word is not None]
        return readable if len(readable) == len(parts) <= most else []

    def _describe_actions(self) -> str:
        most = self.config.most_actions
        several = f", or up to {most} of them, separated by commas" if most > 1 else ""
        return f"Say one of {', '.join(self._by_word)}{several}."

    def _rules(self) -> str:
        signs = ", ".join(f"{self._shown[sign]} {thing}" for thing, sign in self.config.SYMBOLS.items())
        return f"{self._goal()}\nSigns: {signs}."

    def _render(self) -> str:
        rows = (self.config.column_separator.join(map(self._shown.__getitem__, row)) for row in self._board_rows())
        return self.config.row_separator.join(rows)

    def _state_key(self) -> str:
        return "\n".join(self._board_rows())

    def _expert_action(self) -> str:
        return self.config.words[self._expert_direction()]

    @abstractmethod
    def _goal(self) -> str:
        """Return the goal of the game in a sentence or two."""

    @abstractmethod
    def _board_rows(self) -> list[str]:
        """Return the board in characters of `SYMBOLS`."""

    @abstractmethod
    def _move(self, direction: str) -> float:
        """Try to move one cell; return the reward."""

    @abstractmethod
    def _expert_direction(self) -> str:
        """Return the best direction."""
