"""Texts of recorded tokens, as a whole and token by token."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from antiphon.core.errors import RecordError
from antiphon.inspect.samples import find_tokenizer
from antiphon.record import safe_files

UNKNOWN = "\ufffd"  # the first bytes of a character are decoded to it
LONGEST_CHARACTER = 8  # tokens; a longer run of undecodable tokens is shown as it is
MOST_BYTES = 256 << 20  # of a tokenizer


class TokenTexts:
    """The tokenizer of a run, for reading only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, run: Path) -> "TokenTexts":
        """Open the tokenizer that a run holds, in its model or a checkpoint; raise `RecordError` if there is none."""
        path = safe_files.resolve_file(find_tokenizer(run), "tokenizer.json")
        if path.stat().st_size > MOST_BYTES:
            raise RecordError(f"{path} has more than {MOST_BYTES:,} bytes; it is not read", path=path)
        with safe_files.convert_read_errors(path):
            return cls(Tokenizer.from_file(str(path)))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self._tokenizer.decode(_positive(tokens), skip_special_tokens=True))

    def split(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds, special tokens included.

        Of tokens that only together are a character, the last one has it and the others are empty.
        """
        ids, texts, begin, end = _positive(tokens), [], 0, 0
        for place in range(1, len(ids) + 1):
            before, now = self._decode(ids[begin:end]), self._decode(ids[begin:place])
            if now.endswith(UNKNOWN) and place < len(ids) and place - end < LONGEST_CHARACTER:
                texts.append("")
                continue
            texts.append(now[len(before) :])
            begin, end = end, place
        return texts

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _positive(tokens: Sequence[int]) -> list[int]:
    """Return tokens as the tokenizer takes them: a damaged file may hold numbers below zero."""
    return [max(int(token), 0) for token in tokens]
