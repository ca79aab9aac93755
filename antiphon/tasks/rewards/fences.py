"""Find the fenced code blocks of a response, as Markdown has them, and of these the one to be graded."""

import re
from collections.abc import Collection, Iterator

# A fence opens a block at the beginning of a line. Behind other text (`1. `, `Thus: `) it does so with a wanted tag only.
_OPENING = re.compile(r"(?P<before>.*?)(?<![`~])(?P<fence>`{3,}+|~{3,}+)(?P<info>[^`~]*+)$")
_TAG = re.compile(r"[{.\s]*([\w+#-]*)")  # `python`, and of `{.python}` and `python title="x"` the same


def last_block(text: str, tags: Collection[str]) -> str | None:
    """Return the last closed block with one of these tags, in lower case; if there is none, the last one without a tag.

    A block without a tag often holds output, so one with a tag goes first.
    """
    found: dict[bool, str] = {}
    for tag, content in _blocks(text, tags):
        if tag in tags or not tag:
            found[tag in tags] = content
    return found.get(True, found.get(False))


def _blocks(text: str, tags: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the tag and the content of each closed block, in order."""
    opening: re.Match[str] | None = None
    content: list[str] = []
    for line in text.split("\n"):
        if opening is None:
            opening, content = _opening(line.rstrip(), tags), []
            continue
        before = _before_closing(line.rstrip(), opening["fence"])
        if before is None:
            content.append(line)
            continue
        content += [before] if before.strip() else []
        # The fence's indentation; behind `1. ` that of the block is that of its end.
        margin = before if opening["before"].strip() else opening["before"]
        indent = len(margin) if not margin.strip() else 0
        dedented = re.sub(rf"^[ \t]{{0,{indent}}}", "", "".join(f"{each}\n" for each in content), flags=re.MULTILINE)
        yield _tag(opening), dedented
        opening = None


def _opening(line: str, tags: Collection[str]) -> re.Match[str] | None:
    found = _OPENING.match(line)
    return found if found and (not found["before"].strip() or _tag(found) in tags) else None


def _tag(opening: re.Match[str]) -> str:
    found = _TAG.match(opening["info"])
    return found[1].lower() if found else ""


def _before_closing(line: str, fence: str) -> str | None:
    """Return what stands before the closing fence of a line, which ends with it; None if it has none."""
    before = line.rstrip(fence[0])
    return before if len(line) - len(before) >= len(fence) else None
