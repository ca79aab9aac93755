"""Disjoint splits by content: a hash of a problem's text decides its split."""

import hashlib

from antiphon.core.errors import ConfigError

SPLITS = ("train", "validation", "test")


def check_split(split: str) -> None:
    """Raise `ConfigError` if there is no such split."""
    if split not in SPLITS:
        raise ConfigError(f"{split!r} must be {', '.join(SPLITS)}", key="split", value=split, valid=SPLITS)


def split_of(text: str) -> str:
    """Return the split of a text: `test` and `validation` for a tenth each, `train` for the rest; the same on every machine."""
    bucket = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % 10
    return {0: "test", 1: "validation"}.get(bucket, "train")
