r"""Multiple choice: 1 for the right option, else 0.

The last clear statement counts: `\boxed{B}`, "the answer is (B)", "Answer: **B**", "the answer is Paris", or a last line that
is only the option ("B", "(B)", "B) Paris"). A statement that names several options, such as "A or B" or a letter with the text
of another option, is wrong, so guessing does not pay. A letter must stand alone and, unless it is the whole statement, be a
capital; a letter in running text is no statement.
"""

import re
from collections.abc import Mapping
from string import ascii_uppercase
from typing import Any

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import MARKUP, MINUS, answer_statements, ground_truth, zero_score

_PUNCTUATION = " \t().:;,!?"
_LEADING = re.compile(r"(?:[ \t():;,!?]|\.(?!\d))*")  # punctuation, but not the point of ".5"
# What makes another number of an option that begins or ends with a digit.
_GOES_ON_BEFORE = re.compile(r"(?:[-+.]|[/^%√×÷·±≤≥]\s*|\d[,:]|\d\s*[-+]\s*|\b(?:minus|negative)\s*)$", re.IGNORECASE)
_GOES_ON_BEHIND = re.compile(r"\s*[/^%√×÷·]|[-+]\w|[.,:]\d|\s*[-+]\s*\d")

_OPTION = "\0"  # stands for an option that a statement names
_DENIALS = (
    r"not|never|neither|none|nor|cannot|except|but|other than|unlike|rul(?:e|es|ed|ing) out|(?:is|are|was|ca|wo|could)n['’]?t"
    r"|wrong|incorrect|false|impossible|hardly|unlikely|doubtful|besides|save|without|avoid|instead of|rather than|far from"
    r"|different from|less likely|opposite of|eliminate[sd]?|exclude[sd]?|excluding|discard(?:ed)?|reject(?:s|ed)?|refuted?"
    r"|disproved|a (?:distractor|trap|decoy)"
)
_HEDGES = (
    "is|was|or|are|seems|looks|probably|certainly|definitely|clearly|most|very"
    "|can|could|should|must|may|might|has|been|be|also"
)
# What a statement says of an option other than that it is the answer.
_REFUSED = re.compile(
    rf"^[^{_OPTION}]*\b(?:{_DENIALS}|either)\b[^{_OPTION}]*{_OPTION}"
    rf"|{_OPTION}\W*(?:(?:{_HEDGES})\s+)*(?:{_DENIALS}|no(?=\W*$)|nope|minus)\b"
    rf"|{_OPTION}\W*\bor\b(?!\W*{_OPTION})|^[^{_OPTION}]*\bor\W*{_OPTION}",  # or something else
    re.IGNORECASE,
)
# Signs that deny a letter, or join it to others.
_DENYING_SIGN = re.compile(
    r"\\(?:lnot|neg|not|sim|bar|overline|lor|vee|complement|x?cancel|sout)(?![A-Za-z])"
    r"|[¬≠∼∨✗✘❌🚫⛔👎\u0300-\u036f\u20d0-\u20ff]|~~|<(?:s|del|strike)>"
    r"|(?:^|[\s({$:])[!~]\s*\(?\w|\b[A-Za-z]\}?\s*(?:\^\s*\{?\s*(?:c|C|\\complement)\b|['′])"
)


def multiple_choice(
    prompt: Prompt, transcript: Transcript, *, answer: str = "answer", choices: str = "choices"
) -> Score:
    """Return 1 if the response names the right option.

    The payload's `answer` is a letter, an index (an integer from 0) or a text. Its `choices` are a list of texts or a mapping
    of letters to texts; without them the options are the letters A to H.

    Raises:
        ValueError: The right answer is none of the options.
    """
    options = _options(prompt, choices)
    right = _right_label(prompt, answer, options)
    only = _only_option((transcript.response.strip().splitlines() or [""])[-1], options)
    statements = answer_statements(transcript.response, options.values())
    for named in (only, *(_named(statement, options) for statement in statements)):
        if len(named) == 1:
            return Score.of(named == {right})
        if named:
            return zero_score(f"the response names {', '.join(sorted(named))}")
    return zero_score("the response names no option")


Options = Mapping[str, str]  # label -> text, empty if unknown


def _options(prompt: Prompt, key: str) -> Options:
    found = prompt.payload.get(key) if isinstance(prompt.payload, Mapping) else None
    if found is None:
        return dict.fromkeys("ABCDEFGH", "")
    if not isinstance(found, Mapping):
        found = dict(zip(ascii_uppercase, found, strict=False))
    return {str(label): _strip_markup(str(text)) for label, text in found.items()}


def _right_label(prompt: Prompt, key: str, options: Options) -> str:
    given: Any = ground_truth(prompt, key).strip()
    if isinstance(prompt.payload[key], int) and 0 <= prompt.payload[key] < len(options):
        return list(options)[prompt.payload[key]]
    named = {given} & options.keys() or _only_option(given, options)
    if len(named) != 1:
        raise ValueError(
            f"the right answer {given!r} of prompt {prompt.id} is none of {', '.join(options)} and their texts"
        )
    return named.pop()


def _strip_markup(text: str) -> str:
    """Remove the markup of Markdown and LaTeX and surrounding punctuation; write each minus as `-`."""
    bare = MINUS.sub("-", MARKUP.sub("", text)).rstrip(_PUNCTUATION)
    return _LEADING.sub("", bare, count=1).casefold()


def _only_option(text: str, options: Options) -> set[str]:
    """Return the options that a text consists of: a label, an option's text, or both."""
    bare = _strip_markup(text)
    return {
        label
        for label, option in options.items()
        if (bare == label.casefold() and not _DENYING_SIGN.search(text))
        or (option and bare in {option, *(f"{label.casefold()}{sign} {option}" for sign in ").:")})
    }


def _named(statement: str, options: Options) -> set[str]:
    """Return the options that a statement names."""
    if only := _only_option(statement, options):
        return only
    if _DENYING_SIGN.search(statement):
        return set(options)
    named, rest = set(), MINUS.sub("-", MARKUP.sub("", statement))
    for label, option in sorted(options.items(), key=lambda item: -len(item[1])):  # "Paris, Texas" before "Paris"
        if option:
            pattern = rf"(?<!\w){re.escape(option)}(?!\w)"
            rest, found = _mark(re.compile(pattern, re.IGNORECASE), rest)
            named |= {label} if found else set()
    for label in filter(rest.__contains__, options):
        rest, found = _mark(re.compile(rf"(?<![\w'’°-]){re.escape(label)}(?![\w'’+#-])"), rest)
        named |= {label} if found else set()
    return set(options) if named and _REFUSED.search(rest) else named


def _mark(option: re.Pattern[str], text: str) -> tuple[str, bool]:
    """Put the mark of an option in place of it, unless it is a part of another number, and return whether it was found."""

    def mark(found: re.Match[str]) -> str:
        first, last = found[0][0], found[0][-1]
        part = (first.isdigit() and _GOES_ON_BEFORE.search(text[: found.start()])) or (
            last.isdigit() and _GOES_ON_BEHIND.match(text, found.end())
        )
        return found[0] if part else _OPTION

    marked = option.sub(mark, text)
    return marked, marked != text
