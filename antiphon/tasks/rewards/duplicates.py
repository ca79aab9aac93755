"""A group whose siblings should not all say the same."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript


def duplicates(
    prompt: Prompt, transcripts: Sequence[Transcript], scores: Sequence[Score], *, penalty: float = 0.5
) -> list[Score]:
    """Each score, less `penalty` times the share of the siblings whose last response is the same, spaces and case aside. The
    parts are those of the score, and `copies`; its turns stay, so the last one pays the penalty. Other words for the same
    thing are no copy, so a small penalty is enough."""
    said = [" ".join(transcript.response.casefold().split()) for transcript in transcripts]
    count = Counter(said)
    return [
        replace(
            score,
            value=(score.value or 0.0) - penalty * copies / max(len(said) - 1, 1),
            parts={**score.parts, "copies": float(copies)},
        )
        for text, score in zip(said, scores, strict=True)
        for copies in (count[text] - 1,)
    ]
