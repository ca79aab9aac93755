"""Regular expression: 1 for a response that matches, else 0."""

import re

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import ground_truth


def regex(
    prompt: Prompt,
    transcript: Transcript,
    *,
    pattern: str | None = None,
    key: str = "pattern",
    whole: bool = True,
    ignore_case: bool = False,
) -> Score:
    """Return 1 if the stripped response matches `pattern`, or without one the payload's `key`.

    Without `whole` the pattern may match anywhere. A dot matches line breaks too. To compare what a pattern captures with an
    answer, use `exact_match`.

    Raises:
        ValueError: The pattern is no regular expression.
    """
    wanted = ground_truth(prompt, key) if pattern is None else pattern
    try:
        compiled = re.compile(wanted, re.DOTALL | (re.IGNORECASE if ignore_case else re.NOFLAG))
    except re.error as error:
        raise ValueError(f"pattern {wanted!r} is no regular expression: {error}") from None
    text = transcript.response.strip()
    return Score.of(bool(compiled.fullmatch(text) if whole else compiled.search(text)))
