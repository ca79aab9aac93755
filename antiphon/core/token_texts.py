"""The text that each token of a sequence adds to it."""

from collections.abc import Callable, Sequence

UNKNOWN = "\ufffd"  # the first bytes of a character are decoded to it
LONGEST_CHARACTER = 8  # tokens; a longer run of undecodable tokens is returned as it is


def split_tokens(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds.

    Of tokens that only together are a character, the last one has it and the others are empty.

    Args:
        decode: Returns the text of tokens, special tokens included.
        tokens: The tokens [L].
    """
    texts, begin, end = [], 0, 0
    for place in range(1, len(tokens) + 1):
        before, now = decode(tokens[begin:end]), decode(tokens[begin:place])
        if now.endswith(UNKNOWN) and place < len(tokens) and place - end < LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(now[len(before) :])
        begin, end = end, place
    return texts
