"""Instructions about content and format."""

import json
import re

from antiphon.tasks.rewards.instructions.registry import instruction


@instruction("detectable_content:number_placeholders")
def number_placeholders(response: str, *, num_placeholders: int) -> bool:
    """Return True for at least as many [placeholders] as asked, each on one line."""
    return sum(map(_brackets, response.split("\n"))) >= num_placeholders


def _brackets(line: str) -> int:
    count = place = 0
    while (opened := line.find("[", place)) >= 0 and (closed := line.find("]", opened)) >= 0:
        count, place = count + 1, closed + 1
    return count


@instruction("detectable_content:postscript")
def postscript(response: str, *, postscript_marker: str) -> bool:
    """Return True if the marker occurs, in either case; P.S. and P.P.S may have spaces between their letters."""
    marker = postscript_marker.strip()
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(known.get(marker, re.escape(marker.lower())), response.lower()) is not None


@instruction("detectable_format:number_bullet_lists")
def number_bullet_lists(response: str, *, num_bullets: int) -> bool:
    """Return True for exactly as many lines as asked that begin with * (but not **) or with -."""
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", response, re.MULTILINE)
    return len(stars) + len(re.findall(r"^[^\S\n]*-", response, re.MULTILINE)) == num_bullets


@instruction("detectable_format:constrained_response")
def constrained_response(response: str) -> bool:
    """Return True if one of the three answers occurs."""
    return any(f"My answer is {answer}." in response for answer in ("yes", "no", "maybe"))


@instruction("detectable_format:number_highlighted_sections")
def number_highlighted_sections(response: str, *, num_highlights: int) -> bool:
    """Return True for at least as many *highlighted* or **highlighted** passages as asked, each on one line."""
    found = re.findall(r"\*([^\n*]*)\*", response) + re.findall(r"\*\*([^\n*]*)\*\*", response)
    return sum(bool(passage.strip()) for passage in found) >= num_highlights


@instruction("detectable_format:multiple_sections")
def multiple_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    """Return True for at least as many headings as asked: the word followed by a number."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


@instruction("detectable_format:json_format")
def json_format(response: str) -> bool:
    """Return True if the whole response is JSON, in a Markdown block or not."""
    text = response.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@instruction("detectable_format:title")
def title(response: str) -> bool:
    """Return True if there is a <<title>> on one line."""
    return any(map(_titled, response.split("\n")))


def _titled(line: str) -> bool:
    opened, closed = line.find("<<"), line.rfind(">>")
    return 0 <= opened < closed - 2 and bool(line[opened : closed + 2].lstrip("<").rstrip(">").strip())
