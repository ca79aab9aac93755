"""Equal questions and questions that contain parts of others, by words, without embeddings.

Words are compared without case, accents and spaces. A word is letters and digits in a row, or a character of a script that is
written without spaces, or any other symbol: `(2+3)*4` has seven words. Marks that divide sentences are no words, unless they
are part of a formula, as those of `1.5`, `3:4`, `5!` and `f'(x)` are. Two questions are equal if their words are. A question
overlaps a test question if they have `n` words in a row in common, if it contains all of a test question of fewer words, or if
it is equal to one of very few.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

NGRAM = 13  # words; as in the contamination studies of GPT-3
SHORTEST = 4  # words of a test question that is looked for as a part; shorter ones are in many texts by chance
Words = tuple[str, ...]

# Han, kana, Thai, Lao, Burmese and Khmer: no spaces divide their words.
_UNSPACED = (
    "\u3005\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
)
# Marks of sentences, quotation, and of markup around formulas.
_PUNCTUATION = ".,:;?!\"'`$\u00a1\u00bf\u00ab\u00bb\u2014\u2015\u2018-\u201f\u2026\u2039\u203a\u3001\u3002\u300c-\u300f"
_LETTER = rf"[^\W\d_{_UNSPACED}]"
_NAME = f"(?<=(?<!{_LETTER}){_LETTER})"  # after a letter alone, the name of a variable or a function
_WORD = re.compile(
    "|".join(
        (
            f"[{_UNSPACED}]",
            rf"[^\W_{_UNSPACED}]+",
            r"[.,:](?=\d)",  # in a number, a ratio, a time or a list
            rf"(?:(?<=[\d)\]}}|])|{_NAME})!+|!(?=[\w(=])",  # a factorial or a negation
            rf"{_NAME}'+(?!{_LETTER})",  # a derivative
            rf"[^\w\s{_PUNCTUATION}]|_",
        )
    )
)
_BETWEEN_DIGITS = re.compile(r"(?<=\d)\s*([.,:])\s*(?=\d)")
_SAME = str.maketrans(dict.fromkeys("\u2010\u2011\u2013\u2212", "-") | {"\u2019": "'"})
# Unlike other variants of characters, these are not the plain ones: 10² is not 102.
_DISTINCT = frozenset({"<super>", "<sub>", "<fraction>", "<circle>"})
_ACCENTS = frozenset({*range(10, 37), *range(200, 241)})  # combining classes; others make other letters


class Overlap(NamedTuple):
    """A question that has words in a row in common with a test question."""

    row: int  # from 0
    test_row: int  # from 0, the first of them
    words: str


def words_of(text: str) -> Words:
    """Return the words of a text, see above."""
    return tuple(_WORD.findall(_BETWEEN_DIGITS.sub(r"\1", _normalize(text))))


def _normalize(text: str) -> str:
    """Return a text without case, accents and invisible characters, and with one of several forms of a character."""
    if text.isascii():
        return text.casefold()
    plain = text.translate({ord(char): _fold(char) for char in set(text)}).translate(_SAME)
    kept, base = list[str](), ""
    for char in unicodedata.normalize("NFD", plain.casefold()):
        if not (combining := unicodedata.combining(char)):
            base = char
        elif combining in _ACCENTS and base.isalpha():  # the stroke of ≠ is no accent
            continue
        kept.append(char)
    return unicodedata.normalize("NFC", "".join(kept))


def _fold(char: str) -> str:
    """Return the plain form of a character, such as those of other widths; one that is not the same is set apart."""
    if unicodedata.category(char) == "Cf" or "\ufe00" <= char <= "\ufe0f":  # invisible
        return ""
    kind = unicodedata.decomposition(char).partition(" ")[0]
    if kind in _DISTINCT:
        return f" {char} "
    return unicodedata.normalize("NFKD", char) if kind.startswith("<") else char


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
    whole: dict[Words, int] = {}  # too short to be looked for as a part
    lengths = set[int]()
    for number, test in enumerate(tests):
        words = words_of(test)
        size = min(n, len(words))
        if size < min(SHORTEST, n):
            whole.setdefault(words, number)
            continue
        lengths.add(size)
        for gram in ngrams(words, size):
            index.setdefault(gram, number)
    for number, question in enumerate(questions):
        words = words_of(question)
        if words in whole:
            yield Overlap(number, whole[words], " ".join(words))
        elif overlap := _find_overlap(words, index, lengths):
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
