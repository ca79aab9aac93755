"""Finding the answer in a response, and the right one in a payload."""

import re
from collections.abc import Mapping

from antiphon.types import Prompt, Score, ScoreStatus


def right_answer(prompt: Prompt, key: str) -> str:
    """The payload's `key` as text. `ValueError` if there is none: there is nothing to judge by."""
    if not isinstance(prompt.payload, Mapping) or prompt.payload.get(key) is None:
        raise ValueError(f"the payload of prompt {prompt.id} has no {key!r}")
    return str(prompt.payload[key])


def last_match(pattern: str | None, text: str) -> str | None:
    """What the last match of `pattern` captures (its first group, or all of it); without a pattern the whole text."""
    if pattern is None:
        return text.strip()
    matches = list(re.finditer(pattern, text, re.DOTALL))
    if not matches:
        return None
    found: str | None = matches[-1][1 if matches[-1].re.groups else 0]
    return None if found is None else found.strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` whose braces balance; None if there is none."""
    start = text.rfind(r"\boxed{")
    while start >= 0:
        depth = 0
        for place in range(start + len(r"\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + len(r"\boxed{") : place].strip()
        start = text.rfind(r"\boxed{", 0, start)
    return None


def wrong(detail: str) -> Score:
    """A response that was judged, and is worth nothing."""
    return Score(status=ScoreStatus.SCORED, value=0.0, detail=detail)
