"""Texts of recorded tokens, as a whole and token by token."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from antiphon.core.errors import RecordError
from antiphon.core.token_texts import split_tokens
from antiphon.inspect.samples import find_tokenizer
from antiphon.record import safe_files

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
        """Return the text that each token adds, special tokens included; see `split_tokens`."""
        return split_tokens(lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=False)), _positive(tokens))


def _positive(tokens: Sequence[int]) -> list[int]:
    """Return tokens as the tokenizer takes them: a damaged file may hold numbers below zero."""
    return [max(int(token), 0) for token in tokens]
