"""Instructions about language and case."""

import re

from antiphon.tasks.rewards.instructions.registry import compare, instruction
from antiphon.tasks.rewards.languages import LANGUAGES, detect_language


@instruction("language:response_language")
def response_language(response: str, *, language: str) -> bool:
    """Return True if the response is in the language with this ISO 639-1 code."""
    if language not in LANGUAGES:
        raise ValueError(f"language {language!r} cannot be recognised; these can: {', '.join(sorted(LANGUAGES))}")
    return detect_language(response) == language


@instruction("change_case:english_capital")
def english_capital(response: str) -> bool:
    """Return True for an English response without lower-case letters."""
    return response.isupper() and detect_language(response) == "en"


@instruction("change_case:english_lowercase")
def english_lowercase(response: str) -> bool:
    """Return True for an English response without capital letters."""
    return response.islower() and detect_language(response) == "en"


@instruction("change_case:capital_word_frequency")
def capital_word_frequency(response: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """Return True if as many words as asked are all in capitals."""
    return compare(capital_words(response), capital_relation, capital_frequency)


_WORD = re.compile(r"\w+(?:(?!['’](?:s|m|d|t|re|ve|ll)\b)[-./'’]\w+)*", re.IGNORECASE)


def capital_words(text: str) -> int:
    """Count the words that are all in capitals.

    A word with hyphens, dots or slashes inside is one; a contraction is two (IT'S), as in the Penn treebank; "I" is one.
    """
    return sum(word.isupper() for word in _WORD.findall(text))
