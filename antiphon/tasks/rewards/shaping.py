"""Rewards of the form alone, for `composed`: small weights, gated by the reward that matters.

Neither knows whether a response is any good, and both can be had for nothing: a wanted length by filling up or breaking off, a
low repetition by a list of words. By themselves, or with a weight that outbids being right, they are what is learnt. The soft
punishment of completions near the token limit is another thing: `algorithm.reward.overlong_tokens`.
"""

from collections.abc import Sequence
from typing import Literal

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript

Unit = Literal["words", "characters"]


def length(
    prompt: Prompt, transcript: Transcript, *, high: int, low: int = 0, fade: int = 0, unit: Unit = "words"
) -> Score:
    """1 for a response of `low` to `high` words or characters, falling evenly to 0 at `fade` below or above. `ValueError` for
    another unit, or where `low` is above `high`."""
    if low > high:
        raise ValueError(f"low {low} is above high {high}")
    count = len(_units(transcript.response, unit))
    outside = max(low - count, count - high, 0)
    return Score.of(max(1 - outside / (fade + 1), 0.0), **{unit: float(count)})


def repetition(prompt: Prompt, transcript: Transcript, *, ngram: int = 4, unit: Unit = "words") -> Score:
    """Minus the share of n-grams of words or characters that were there before: 0 for a response without, down to -1. Take
    characters for languages that put no spaces between words. `ValueError` for another unit, or n below 1.

    Source: the penalty of Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning in LLMs", over the whole response.
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
