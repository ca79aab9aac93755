"""The model of tiny_arithmetic, with the characters of three domains."""

import string
from pathlib import Path

from antiphon.learning.model.tiny import make_tokenizer, write_tiny_model

CHARACTERS = string.digits + string.ascii_lowercase + "+-*=,:() "


def build(directory: Path | str, seed: int = 0) -> None:
    """Write the model and its tokenizer to `directory`."""
    write_tiny_model(directory, seed, make_tokenizer(CHARACTERS))
