"""Shaping rewards for `composed`, to be used with small weights and gated by the main reward.

They know nothing of correctness and are easy to hack: a length by filler, low repetition by a list of words. Alone, or with a
large weight, they are what the policy learns. The soft penalty for completions near the token limit is a setting of its own,
`algorithm.reward.overlong_tokens`.
"""

import re
import unicodedata
from typing import Literal

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import visible

Unit = Literal["words", "characters"]

LONGEST_WORD = 40  # characters; a text without spaces is no single word
_ACCENTS = re.compile("[\u0300-\u036f\u20d0-\u20ff]")
_EDGES = re.compile(r"^[^\w+=<>]+|[^\w+=<>]+$|^_+|_+$")
_ASCII_EDGES = "".join(sign for sign in map(chr, range(128)) if not sign.isalnum() and sign not in "+=<>")


def length(
    prompt: Prompt, transcript: Transcript, *, high: int, low: int = 0, fade: int = 0, unit: Unit = "words"
) -> Score:
    """Return 1 for a response of `low` to `high` units, falling linearly to 0 over `fade` units below or above.

    A word has a letter or a digit, and counts several times if it has more than `LONGEST_WORD` characters. Spaces in a row
    count as one character. What cannot be seen does not count.

    Raises:
        ValueError: The unit is unknown, or `low` is above `high`.
    """
    if low > high:
        raise ValueError(f"low {low} is above high {high}")
    _check_unit(unit)
    text = visible(transcript.response)
    if unit == "words":
        words = [word for word in text.split() if word[0].isalnum() or any(map(str.isalnum, word))]
        longest = max(map(len, words), default=0)
        count = len(words) if longest <= LONGEST_WORD else sum(-(-len(word) // LONGEST_WORD) for word in words)
    else:
        count = len(" ".join(text.split()))
    outside = max(low - count, count - high, 0)
    return Score.of(max(1 - outside / (fade + 1), 0.0), **{unit: float(count)})


def repetition(prompt: Prompt, transcript: Transcript, *, ngram: int = 4, unit: Unit = "words") -> Score:
    """Return minus the share of repeated n-grams: from 0 without repetition to -1.

    The penalty of Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning in LLMs", over the whole response. Use
    characters for languages without spaces between words. Case, accents, punctuation around words, kinds of spaces and what
    cannot be seen make no difference.

    Raises:
        ValueError: The unit is unknown, or `ngram` is below 1.
    """
    if ngram < 1:
        raise ValueError(f"ngram {ngram} is not a length")
    _check_unit(unit)
    text = transcript.response.casefold()
    if not text.isascii():
        text = _ACCENTS.sub("", unicodedata.normalize("NFKD", visible(text)).casefold())
    words = text.split()
    units = [bare for word in words if (bare := _bare_word(word))] if unit == "words" else " ".join(words)
    found = list(zip(*(units[start:] for start in range(ngram)), strict=False))
    return Score.of(len(set(found)) / len(found) - 1 if found else 0.0)


def _bare_word(word: str) -> str:
    """Return a word without the signs around it; signs alone, unless they are all punctuation."""
    bare = word.strip(_ASCII_EDGES)
    if not bare.isascii():
        bare = _EDGES.sub("", bare)
    return bare or ("" if all(unicodedata.category(sign).startswith("P") for sign in word) else word)


def _check_unit(unit: str) -> None:
    if unit not in ("words", "characters"):
        raise ValueError(f"unit {unit!r} is neither 'words' nor 'characters'")
