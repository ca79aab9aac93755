"""Find the answer in a response, and the right answer in a payload."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

import regex

from antiphon.core.types import Prompt, Score, ScoreStatus


def ground_truth(prompt: Prompt, key: str) -> str:
    """Return the right answer, the payload's `key`, as text; `ValueError` if there is none."""
    if not isinstance(prompt.payload, Mapping) or prompt.payload.get(key) is None:
        raise ValueError(f"the payload of prompt {prompt.id} has no {key!r}")
    return str(prompt.payload[key])


PATTERN_SECONDS = 1.0  # of processor time, after which a pattern does not match: some take years for a short text


@lru_cache(256)
def compile_pattern(pattern: str, ignore_case: bool = False) -> "regex.Pattern[str]":
    """Compile a pattern, whose dots match line breaks too, for matching with a `timeout`; `ValueError` if it is none."""
    try:
        return regex.compile(pattern, regex.DOTALL | (regex.IGNORECASE if ignore_case else 0))
    except regex.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None


def last_match(pattern: str | None, text: str) -> str | None:
    """Return what the last match of `pattern` captures (its first group, or all of it); without a pattern the whole text."""
    if pattern is None:
        return text.strip()
    try:
        matches = list(compile_pattern(pattern).finditer(text, timeout=PATTERN_SECONDS))
    except TimeoutError:
        return None
    if not matches:
        return None
    found: str | None = matches[-1][1 if matches[-1].re.groups else 0]
    return None if found is None else found.strip()


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` with balanced braces; None if there is none."""
    place, content = _last_box(text[-MOST_CHARACTERS:])
    return None if place < 0 else content


_INVISIBLE = re.compile(  # characters without width, and fillers that are shown as nothing
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\U000e0000-\U000e0fff]"
)


def visible(text: str) -> str:
    """Return the text without characters that cannot be seen: they part words, hide them, or stand for an answer."""
    return text if text.isascii() else _INVISIBLE.sub("", text)


_BOX = r"\boxed"
_SPACED_BOX = rf"{_BOX} "


def _last_box(text: str) -> tuple[int, str]:
    """Return the start of the last box, -1 if there is none, and its content. Reads each brace once.

    Of boxes in one another the outermost counts, since what stands around the inner one is a part of the answer.
    """
    opened: list[int] = []  # positions of open braces
    begins = ends = first = last = -1  # of the last box, and of its content
    opening, closing = text.find("{"), text.find("}")
    while closing >= 0:
        if 0 <= opening < closing:
            opened.append(opening)
            opening = text.find("{", opening + 1)
            continue
        if opened:
            inside = opened.pop()
            if text.endswith((_BOX, _SPACED_BOX), 0, inside):
                if (begins, ends) != (inside + 1, closing - 1):  # else it has nothing but another box
                    first, last = inside + 1, closing
                begins, ends = text.rfind(_BOX, 0, inside), closing
        closing = text.find("}", closing + 1)
    return begins, text[first:last].strip()


MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\b|[${}*_`\"“”\\]")  # of Markdown and LaTeX
MINUS = re.compile(r"[\N{MINUS SIGN}\ufe63\uff0d\u207b]|[\N{EN DASH}\u2010\u2011](?=\d)")
MOST_CHARACTERS = 200_000  # at the end of a response, in which its answer is looked for
MOST_STATEMENTS = 20  # the last ones of a response are read
MOST_STATEMENT_CHARACTERS = 1_000
_MARKER = re.compile(  # begins with one class of characters, which lets `re` search fast
    r"[aocAOC#](?:(?<!\w[aocAOC])(?i:(?<=a)nswer|(?<=o)ption|(?<=c)hoice)\b\**\s*(?i:is\b|:|=)[\s:*=]*+"
    r"|(?<=#)###\s*)"
)
_END_OF_SENTENCE = re.compile(r"\.(?=\s|$)")


def answer_statements(text: str, answers: Iterable[str] = (), *, whole_lines: bool = False) -> list[str]:
    r"""Return the statements of an answer, the last first.

    They are the content of the last `\boxed{…}`, and what follows "answer is", "answer:" (or option, choice) or "####", up to
    the end of the sentence or the line, or with `whole_lines` of the line. What follows and begins with "not" is left out,
    unless it begins with one of the possible `answers`.
    """
    known = "|".join(re.escape(answer) for answer in answers if answer[:3].casefold() == "not")
    denied = re.compile(rf"(?!(?:{known})(?!\w))not\b" if known else r"not\b", re.IGNORECASE)
    text = text[-MOST_CHARACTERS:]
    place, content = _last_box(text)
    found = [(place, content)] if place >= 0 else []
    markers = [each for each in _MARKER.finditer(text) if not denied.match(text, each.end())]
    stated = _line if whole_lines else _sentence
    found += [(marker.start(), stated(text, marker.end())) for marker in markers[-MOST_STATEMENTS:]]
    return [statement for _, statement in sorted(found, reverse=True)]


def _line(text: str, start: int) -> str:
    return text[start : start + MOST_STATEMENT_CHARACTERS + 1].partition("\n")[0].strip()


def _sentence(text: str, start: int) -> str:
    line = text[start : start + MOST_STATEMENT_CHARACTERS + 1].partition("\n")[0]
    end = _END_OF_SENTENCE.search(line)
    if end is None and len(line) > MOST_STATEMENT_CHARACTERS:
        return line  # too long to be a statement, spaces and all
    return (line[: end.start()] if end else line).strip()


def zero_score(detail: str) -> Score:
    """Return a score of 0 with the reason."""
    return Score(status=ScoreStatus.SCORED, value=0.0, detail=detail)


_HARD_TO_READ = re.compile(  # begins with one class of characters as well
    r"[\d(\[{^*!](?:(?<=\d)\d{199}|(?<=[(\[{])[(\[{]{49}|(?<=\^)\{?\d+\^\{?\d+\^|"
    r"(?<=\*)\*\s*\d+\s*\*\*\s*\d+\s*\*\*|(?<=!)\)\s*!)"
)


_LONG_NUMBER = re.compile(r"\d{200}")


def is_hard_to_read(text: str) -> bool:
    """Return True for texts that cost a grader much time: huge numbers, nested brackets, towers of powers."""
    if "^" not in text and "**" not in text and "!" not in text and sum(map(text.count, "([{")) < 50:
        return len(text) >= 200 and _LONG_NUMBER.search(text) is not None  # faster, and all that is left
    return _HARD_TO_READ.search(text) is not None
