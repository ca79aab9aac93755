"""Instructions about numbers of words, sentences and paragraphs."""

import re

from antiphon.tasks.rewards.instructions.registry import compare, instruction


@instruction("length_constraints:number_words")
def number_words(response: str, *, num_words: int, relation: str) -> bool:
    """Return True for as many words as asked: runs of letters, digits and underscores."""
    return compare(len(re.findall(r"\w+", response)), relation, num_words)


@instruction("length_constraints:number_sentences")
def number_sentences(response: str, *, num_sentences: int, relation: str) -> bool:
    """Return True for as many sentences as asked."""
    return compare(sentences(response), relation, num_sentences)


_END = re.compile(r"""(?<![.!?])[.!?]++["'”’)\]*_]*+(?=\s|$)|[。！？]+""")
_TITLED = re.compile(
    r"(?:^|[^\w.])(?:[^\W\d_]|mr|mrs|ms|dr|prof|st|rev|gen|capt|lt|sgt|vs)$|(?:^|\n)\s*\d+$", re.IGNORECASE
)
_SHORT = re.compile(r"\.$|(?:^|[^\w.])(?:etc|inc|ltd|corp|jr|sr|al|cf|(?:[a-z]\.)+[a-z])$", re.IGNORECASE)


def sentences(text: str) -> int:
    """Count the sentences: they end with . ! ? (or the full-width ones) before a space or the end of the text.

    A full stop after a title, an initial or the number of a list ends no sentence; after another common English abbreviation
    it does before anything but a lower-case letter. A line break ends no sentence, as in the Punkt tokenizer of the public
    code, which was trained on English and knows more abbreviations.
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


@instruction("length_constraints:number_paragraphs")
def number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Return True for as many paragraphs as asked, separated by ***, none of the inner ones empty."""
    paragraphs = re.split(r"\s?\*\*\*\s?", response)
    inner = [bool(paragraph.strip()) for paragraph in paragraphs[1:-1]]
    ends = paragraphs[:1] + paragraphs[1:][-1:]
    return all(inner) and len(inner) + sum(bool(paragraph.strip()) for paragraph in ends) == num_paragraphs


@instruction("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return True for as many paragraphs as asked, separated by empty lines, if the nth (from 1) begins with the word."""
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
