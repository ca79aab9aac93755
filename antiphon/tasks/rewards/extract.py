"""Finding the answer in a response, and the right one in a payload."""

import re
from collections.abc import Mapping

from antiphon.core.types import Prompt, Score, ScoreStatus


def ground_truth(prompt: Prompt, key: str) -> str:
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
    place, content = _last_box(text)
    return None if place < 0 else content


_BOX = r"\boxed"


def _last_box(text: str) -> tuple[int, str]:
    """Return where it begins, -1 if there is none, and its content. Looks at each brace once, whatever is left open."""
    opened: list[int] = []  # places of open braces
    begins, content = -1, ""
    opening, closing = text.find("{"), text.find("}")
    while closing >= 0:
        if 0 <= opening < closing:
            opened.append(opening)
            opening = text.find("{", opening + 1)
            continue
        if opened:
            inside = opened.pop()
            box = inside - len(_BOX)
            if box > begins and text.startswith(_BOX, box):
                begins, content = box, text[inside + 1 : closing].strip()
        closing = text.find("}", closing + 1)
    return begins, content


MOST_STATEMENTS = 20  # of one response that are looked at, the last
LONGEST_STATEMENT = 1_000  # characters
_MARKER = re.compile(r"(?i:\b(?:answer|option|choice)\b\**\s*(?:is\b|:|=)[\s:*=]*+(?!not\b)|####\s*)")


def answer_statements(text: str) -> list[str]:
    r"""What the response says is its answer, from the last to the first: the content of its last `\boxed{…}`, and what follows
    "answer is", "answer:" (or option, choice) or "####", up to the end of the sentence or the line."""
    place, content = _last_box(text)
    found = [(place, content)] if place >= 0 else []
    markers = list(_MARKER.finditer(text))[-MOST_STATEMENTS:]
    found += [(marker.start(), _sentence(text, marker.end())) for marker in markers]
    return [said for _, said in sorted(found, reverse=True)]


def _sentence(text: str, start: int) -> str:
    line = text[start : start + LONGEST_STATEMENT].partition("\n")[0]
    return re.split(r"\.(?=\s|$)", line, maxsplit=1)[0].strip()


def zero_score(detail: str) -> Score:
    """A response that was judged, and is worth nothing."""
    return Score(status=ScoreStatus.SCORED, value=0.0, detail=detail)


_HARD_TO_READ = re.compile(  # with one class of characters to begin with, by which `re` finds its places fast
    r"[\d(\[{^*!](?:(?<=\d)\d{199}|(?<=[(\[{])[(\[{]{49}|(?<=\^)\{?\d+\^\{?\d+\^|"
    r"(?<=\*)\*\s*\d+\s*\*\*\s*\d+\s*\*\*|(?<=!)\)\s*!)"
)


def is_hard_to_read(text: str) -> bool:
    """Numbers of hundreds of digits, brackets in brackets, towers of powers: what costs a grader its time."""
    return _HARD_TO_READ.search(text) is not None
