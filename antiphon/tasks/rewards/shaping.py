"""Shaping rewards for `composed`, to be used with small weights and gated by the main reward.

They know nothing of correctness and are easy to hack: a length by filler, low repetition by a list of words. Alone, or with a
large weight, they are what the policy learns. The soft penalty for completions near the token limit is a setting of its own,
`algorithm.reward.overlong_tokens`.
"""

from collections.abc import Sequence
from typing import Literal

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript

Unit = Literal["words", "characters"]


def length(
    prompt: Prompt, transcript: Transcript, *, high: int, low: int = 0, fade: int = 0, unit: Unit = "words"
) -> Score:
    """Return 1 for a response of `low` to `high` units, falling linearly to 0 over `fade` units below or above.

    Raises:
        ValueError: The unit is unknown, or `low` is above `high`.
    """
    if low > high:
        raise ValueError(f"low {low} is above high {high}")
    count = len(_units(transcript.response, unit))
    outside = max(low - count, count - high, 0)
    return Score.of(max(1 - outside / (fade + 1), 0.0), **{unit: float(count)})


def repetition(prompt: Prompt, transcript: Transcript, *, ngram: int = 4, unit: Unit = "words") -> Score:
    """Return minus the share of repeated n-grams: from 0 without repetition to -1.

    The penalty of Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning in LLMs", over the whole response. Use
    characters for languages without spaces between words.

    Raises:
        ValueError: The unit is unknown, or `ngram` is below 1.
    """
    if ngram < 1:
        raise ValueError(f"ngram {ngram} is not a length")
    units = _units(transcript.response.lower(), unit)
    found = [tuple(units[start : start + ngram]) for start in range(len(units) - ngram + 1)]
    return Score.of(len(set(found)) / len(found) - 1 if found else 0.0)


def _units(text: str, unit: str) -> Sequence[str]:
    if unit not in ("words", "characters"):
        raise ValueError(f"unit {unit!r} is neither 'words' nor 'characters'")
    return text.split() if unit == "words" else text.strip()
