"""The 25 verifiable instructions of IFEval, one function each, with the keyword arguments of the published data.

Source: Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models", and its public code, whose verdicts
these are, odd ones included (a markdown rule `---` is a bullet). What differs:

* Keywords are text, not regular expressions, and a letter may be any one character: there, another is drawn at random.
* A kwarg that is missing is an error: there, one is drawn at random.
* Sentences are told without a trained model, words in capitals without a tokenizer: see `sentences` and `capital_words`.
* A text whose language cannot be told does not follow an instruction about languages: there, it does.

Every pattern takes time in proportion to the response.
"""

import json
import re
from collections.abc import Callable, Sequence

from antiphon.tasks.rewards.languages import LANGUAGES, detect_language

Check = Callable[..., bool]
CHECKS: dict[str, Check] = {}


def _check(name: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


def _compare(count: int, relation: str, threshold: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"a relation is 'less than' or 'at least', not {relation!r}")
    return count < threshold if relation == "less than" else count >= threshold


def _occurrences(text: str, word: str) -> int:
    return len(re.findall(re.escape(word), text, re.IGNORECASE))


# --- keywords ------------------------------------------------------------------------------------------------------------


@_check("keywords:existence")
def keywords_exist(response: str, *, keywords: Sequence[str]) -> bool:
    """Every keyword is there, also within words."""
    return all(_occurrences(response, keyword) for keyword in keywords)


@_check("keywords:frequency")
def keyword_frequency(response: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """A keyword is there so many times, also within words."""
    return _compare(_occurrences(response, keyword.strip()), relation, frequency)


@_check("keywords:forbidden_words")
def no_forbidden_words(response: str, *, forbidden_words: Sequence[str]) -> bool:
    """None of the words is there as a word of its own."""
    return not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)


@_check("keywords:letter_frequency")
def letter_frequency(response: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """A letter is there so many times, in either case."""
    letter = letter.strip().lower()
    if len(letter) != 1:
        raise ValueError(f"letter is one character, not {letter!r}")
    return _compare(response.lower().count(letter), let_relation, let_frequency)


# --- language and case ---------------------------------------------------------------------------------------------------


@_check("language:response_language")
def response_language(response: str, *, language: str) -> bool:
    """The response is in the language of that ISO 639-1 code; see `languages` for what cannot be told."""
    if language not in LANGUAGES:
        raise ValueError(f"language {language!r} cannot be recognised; these can: {', '.join(sorted(LANGUAGES))}")
    return detect_language(response) == language


@_check("change_case:english_capital")
def english_capital(response: str) -> bool:
    """English, without a small letter."""
    return response.isupper() and detect_language(response) == "en"


@_check("change_case:english_lowercase")
def english_lowercase(response: str) -> bool:
    """English, without a capital letter."""
    return response.islower() and detect_language(response) == "en"


@_check("change_case:capital_word_frequency")
def capital_word_frequency(response: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """So many words are all in capitals."""
    return _compare(capital_words(response), capital_relation, capital_frequency)


_WORD = re.compile(r"\w+(?:(?!['’](?:s|m|d|t|re|ve|ll)\b)[-./'’]\w+)*", re.IGNORECASE)


def capital_words(text: str) -> int:
    """Words all in capitals. One with hyphens, dots or slashes inside is one; a contraction is two (IT'S), as in the Penn
    treebank; "I" is one."""
    return sum(word.isupper() for word in _WORD.findall(text))


# --- lengths -------------------------------------------------------------------------------------------------------------


@_check("length_constraints:number_words")
def number_words(response: str, *, num_words: int, relation: str) -> bool:
    """So many words: runs of letters, digits and underscores."""
    return _compare(len(re.findall(r"\w+", response)), relation, num_words)


@_check("length_constraints:number_sentences")
def number_sentences(response: str, *, num_sentences: int, relation: str) -> bool:
    """So many sentences."""
    return _compare(sentences(response), relation, num_sentences)


_END = re.compile(r"""(?<![.!?])[.!?]++["'”’)\]*_]*+(?=\s|$)|[。！？]+""")
_TITLED = re.compile(
    r"(?:^|[^\w.])(?:[^\W\d_]|mr|mrs|ms|dr|prof|st|rev|gen|capt|lt|sgt|vs)$|(?:^|\n)\s*\d+$", re.IGNORECASE
)
_SHORT = re.compile(r"\.$|(?:^|[^\w.])(?:etc|inc|ltd|corp|jr|sr|al|cf|(?:[a-z]\.)+[a-z])$", re.IGNORECASE)


def sentences(text: str) -> int:
    """Sentences: what ends with . ! ? (or the full-width ones) before a space or the end, and what is left after the last.

    A full stop ends none after a title, an initial or the number of a list; after another common English abbreviation
    only before what is not a small letter. A line break ends none, as in the Punkt tokenizer of the public code, which
    was trained on English and knows more abbreviations.
    """
    count, start = 0, 0
    for end in _END.finditer(text):
        rest = text[end.end() : end.end() + 40].lstrip()
        stop = end.start() + len(end[0].rstrip("\"'”’)]*_"))
        before = text[max(start, stop - 12) : stop - 1]
        if rest and text[stop - 1] == "." and (_TITLED.search(before) or (rest[0].islower() and _SHORT.search(before))):
            continue
        count, start = count + 1, end.end()
    return count + bool(text[start:].strip())


@_check("length_constraints:number_paragraphs")
def number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """So many paragraphs, separated by ***; between two of these there must be one."""
    paragraphs = re.split(r"\s?\*\*\*\s?", response)
    inner = [bool(paragraph.strip()) for paragraph in paragraphs[1:-1]]
    ends = paragraphs[:1] + paragraphs[1:][-1:]
    return all(inner) and len(inner) + sum(bool(paragraph.strip()) for paragraph in ends) == num_paragraphs


@_check("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """So many paragraphs, separated by empty lines, of which the nth (from 1) begins with the word."""
    if not 1 <= nth_paragraph <= num_paragraphs:
        raise ValueError(f"nth_paragraph {nth_paragraph} is none of {num_paragraphs} paragraphs")
    paragraphs = response.split("\n\n")
    if sum(bool(paragraph.strip()) for paragraph in paragraphs) != num_paragraphs:
        return False
    words = paragraphs[nth_paragraph - 1].split()
    if not words:
        return False
    first = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'), maxsplit=1)[0]
    return first.lower() == first_word.lower()


# --- content and format --------------------------------------------------------------------------------------------------


@_check("detectable_content:number_placeholders")
def number_placeholders(response: str, *, num_placeholders: int) -> bool:
    """At least so many [placeholders], each on one line."""
    return sum(map(_brackets, response.split("\n"))) >= num_placeholders


def _brackets(line: str) -> int:
    count = place = 0
    while (opened := line.find("[", place)) >= 0 and (closed := line.find("]", opened)) >= 0:
        count, place = count + 1, closed + 1
    return count


@_check("detectable_content:postscript")
def postscript(response: str, *, postscript_marker: str) -> bool:
    """The marker is there, in either case; in P.S. and P.P.S spaces may stand between the letters."""
    marker = postscript_marker.strip()
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(known.get(marker, re.escape(marker.lower())), response.lower()) is not None


@_check("detectable_format:number_bullet_lists")
def number_bullet_lists(response: str, *, num_bullets: int) -> bool:
    """Exactly so many lines that begin with * (but not **) or with -."""
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", response, re.MULTILINE)
    return len(stars) + len(re.findall(r"^[^\S\n]*-", response, re.MULTILINE)) == num_bullets


@_check("detectable_format:constrained_response")
def constrained_response(response: str) -> bool:
    """One of the three answers is there."""
    return any(f"My answer is {answer}." in response for answer in ("yes", "no", "maybe"))


@_check("detectable_format:number_highlighted_sections")
def number_highlighted_sections(response: str, *, num_highlights: int) -> bool:
    """At least so many *highlighted* or **highlighted** passages, each on one line."""
    found = re.findall(r"\*([^\n*]*)\*", response) + re.findall(r"\*\*([^\n*]*)\*\*", response)
    return sum(bool(passage.strip()) for passage in found) >= num_highlights


@_check("detectable_format:multiple_sections")
def multiple_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many headings, the word with a number behind it."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


@_check("detectable_format:json_format")
def json_format(response: str) -> bool:
    """All of it is JSON, perhaps in a block of markdown."""
    text = response.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@_check("detectable_format:title")
def title(response: str) -> bool:
    """A <<title>> on one line."""
    return any(map(_titled, response.split("\n")))


def _titled(line: str) -> bool:
    opened, closed = line.find("<<"), line.rfind(">>")
    return 0 <= opened < closed - 2 and bool(line[opened : closed + 2].lstrip("<").rstrip(">").strip())


# --- the rest ------------------------------------------------------------------------------------------------------------


@_check("combination:two_responses")
def two_responses(response: str) -> bool:
    """Two different responses, separated by ******."""
    parts = [part.strip() for part in response.split("******")]
    given = [part for part in parts if part]
    return all(parts[1:-1]) and len(given) == 2 and given[0] != given[1]


@_check("combination:repeat_prompt")
def repeat_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    """It begins with the request, in either case."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


@_check("startend:end_checker")
def end_checker(response: str, *, end_phrase: str) -> bool:
    """It ends with the phrase, in either case, quotation marks aside."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@_check("startend:quotation")
def quotation(response: str) -> bool:
    """It stands in double quotation marks."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@_check("punctuation:no_comma")
def no_comma(response: str) -> bool:
    """There is no comma."""
    return "," not in response
