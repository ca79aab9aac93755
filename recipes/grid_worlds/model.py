"""The model of tiny_arithmetic, smaller, with the characters of boards."""

from pathlib import Path

from antiphon.learning.model.tiny import make_tokenizer, write_tiny_model

CHARACTERS = "_/#PGHXS√UDLR"


def build(directory: Path | str, seed: int = 0) -> None:
    """Write the model and its tokenizer to `directory`."""
    write_tiny_model(directory, seed, make_tokenizer(CHARACTERS), hidden_size=96)
