"""Equal questions and questions that contain parts of others, by words, without embeddings.

Words are compared without case, accents, punctuation and spaces. Two questions are equal if their words are. A question
overlaps a test question if they have `n` words in a row in common, or if it contains all of a test question of fewer words.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

NGRAM = 13  # words; as in the contamination studies of GPT-3
SHORTEST = 4  # words of a test question that is looked for as a whole; shorter ones are in many texts by chance
Words = tuple[str, ...]


class Overlap(NamedTuple):
    """A question that has words in a row in common with a test question."""

    row: int  # from 0
    test_row: int  # from 0, the first of them
    words: str


def words_of(text: str) -> Words:
    """Return the words of a text: letters and digits in a row; each sign of mathematics is one, too."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return tuple(re.findall(r"\w+|[-+*/=<>^]", plain.casefold()))


def find_duplicates(questions: Iterable[str]) -> dict[int, int]:
    """Return, for each question that is equal to an earlier one, the number of the first of them."""
    first: dict[Words, int] = {}
    found: dict[int, int] = {}
    for number, question in enumerate(questions):
        earlier = first.setdefault(words_of(question), number)
        if earlier != number:
            found[number] = earlier
    return found


def find_overlaps(questions: Sequence[str], tests: Sequence[str], n: int = NGRAM) -> Iterator[Overlap]:
    """Yield the questions that overlap a test question, each once."""
    index: dict[Words, int] = {}
    lengths = set[int]()
    for number, test in enumerate(tests):
        words = words_of(test)
        size = min(n, len(words))
        if size >= min(SHORTEST, n):
            lengths.add(size)
            for gram in ngrams(words, size):
                index.setdefault(gram, number)
    for number, question in enumerate(questions):
        if overlap := _find_overlap(words_of(question), index, lengths):
            yield Overlap(number, *overlap)


def ngrams(words: Words, n: int) -> Iterator[Words]:
    """Yield all `n` words in a row."""
    return (words[start : start + n] for start in range(len(words) - n + 1))


def _find_overlap(words: Words, index: dict[Words, int], lengths: set[int]) -> tuple[int, str] | None:
    for size in sorted(lengths, reverse=True):
        for gram in ngrams(words, size):
            if gram in index:
                return index[gram], " ".join(gram)
    return None
