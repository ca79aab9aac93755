"""Exact match: 1 for the right answer, else 0."""

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import ground_truth, last_match, zero_score


def exact_match(
    prompt: Prompt,
    transcript: Transcript,
    *,
    answer: str = "answer",
    pattern: str | None = None,
    ignore_case: bool = False,
) -> Score:
    """Compare the stripped response with the payload's `answer`; with a regular expression `pattern`, its last match."""
    expected = ground_truth(prompt, answer).strip()
    given = last_match(pattern, transcript.response)
    if given is None:
        return zero_score("nothing in the response matches the pattern")
    if ignore_case:
        expected, given = expected.casefold(), given.casefold()
    return Score.of(given == expected)
