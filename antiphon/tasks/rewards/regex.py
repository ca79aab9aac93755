"""Regular expression: 1 for a response that matches, else 0."""

import re

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import PATTERN_SECONDS, compile_pattern, ground_truth, visible, zero_score

_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_NAMED_CHARACTER = re.compile(r"\\[uUxN]")
_LETTER = "\N{LATIN LETTER BILABIAL CLICK}"  # which no pattern names


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

    Characters that cannot be seen are left out, and digits of other scripts count as letters, unless the pattern names such
    characters. A pattern that takes more than `PATTERN_SECONDS` of processor time does not match.

    Raises:
        ValueError: The pattern is no regular expression.
    """
    wanted = ground_truth(prompt, key) if pattern is None else pattern
    compiled = compile_pattern(wanted, ignore_case)
    match = compiled.fullmatch if whole else compiled.search
    named = _NAMED_CHARACTER.search(wanted)
    text = transcript.response
    if not named and visible(wanted) == wanted:
        text = visible(text)
    texts = [text.strip()]
    if not named and not _OTHER_DIGIT.search(wanted) and _OTHER_DIGIT.search(text):
        texts.append(_OTHER_DIGIT.sub(_LETTER, texts[0]))  # both have to match: `[^\d]` must not match either
    try:
        return Score.of(all(match(each, timeout=PATTERN_SECONDS) for each in texts))
    except TimeoutError:
        return zero_score(f"the pattern takes more than {PATTERN_SECONDS:g} s for this response")
