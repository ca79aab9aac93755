"""Full-text search by BM25. Needs the package `bm25s`, of the extra `envs`."""

import re
from collections.abc import Sequence

import numpy as np

from antiphon.core.optional_packages import import_optional

_WORD = re.compile(r"\w+")
STOP_WORDS = frozenset(
    _WORD.findall("a an and are as at be but by for if in into is it no not of on or the to was with")
)


class Index:
    """An index of texts.

    BM25 as Lucene computes it, with the k1 = 0.9 and b = 0.4 of Pyserini; words are lower-cased and not stemmed.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        bm25s = import_optional("bm25s", "search")
        words = [tokenize(text) for text in texts]
        self._vocabulary = frozenset().union(*words)
        self._bm25 = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
        if self._vocabulary:
            self._bm25.index(words, show_progress=False)

    def search(self, query: str, most: int) -> list[int]:
        """Return the numbers of at most `most` texts that share a word with `query`, best first, ties in order."""
        words = [word for word in tokenize(query) if word in self._vocabulary]
        if not words:
            return []
        scores = self._bm25.get_scores(words)
        best = np.argsort(-scores, kind="stable")[:most]
        return [int(number) for number in best if scores[number] > 0]


def tokenize(text: str) -> list[str]:
    """Return the lower-cased words of a text without stop words.

    >>> tokenize("The mug, in Dark Blue")
    ['mug', 'dark', 'blue']
    """
    return [word for word in _WORD.findall(text.lower()) if word not in STOP_WORDS]
