"""Instructions about keywords and letters."""

import re
from collections.abc import Sequence

from antiphon.tasks.rewards.instructions.registry import compare, instruction


@instruction("keywords:existence")
def keywords_exist(response: str, *, keywords: Sequence[str]) -> bool:
    """Return True if every keyword occurs, within words too."""
    return all(_occurrences(response, keyword) for keyword in keywords)


@instruction("keywords:frequency")
def keyword_frequency(response: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """Return True if a keyword occurs as often as asked, within words too."""
    return compare(_occurrences(response, keyword.strip()), relation, frequency)


@instruction("keywords:forbidden_words")
def no_forbidden_words(response: str, *, forbidden_words: Sequence[str]) -> bool:
    """Return True if none of the words occurs as a whole word."""
    return not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)


@instruction("keywords:letter_frequency")
def letter_frequency(response: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Return True if a letter occurs as often as asked, in either case."""
    letter = letter.strip().lower()
    if len(letter) != 1:
        raise ValueError(f"letter is one character, not {letter!r}")
    return compare(response.lower().count(letter), let_relation, let_frequency)


def _occurrences(text: str, word: str) -> int:
    return len(re.findall(re.escape(word), text, re.IGNORECASE))
