"""A reward of groups that penalizes equal responses."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript


def duplicates(
    prompt: Prompt, transcripts: Sequence[Transcript], scores: Sequence[Score], *, penalty: float = 0.5
) -> list[Score]:
    """Subtract `penalty` times the share of siblings with the same last response, ignoring spaces and case.

    The part `copies` counts them. Rewards of turns stay, so the last turn pays the penalty.
    """
    responses = [" ".join(transcript.response.casefold().split()) for transcript in transcripts]
    count = Counter(responses)
    return [
        replace(
            score,
            value=(score.value or 0.0) - penalty * copies / max(len(responses) - 1, 1),
            parts={**score.parts, "copies": float(copies)},
        )
        for text, score in zip(responses, scores, strict=True)
        for copies in (count[text] - 1,)
    ]
