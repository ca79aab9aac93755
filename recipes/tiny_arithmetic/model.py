"""A language model of 850,000 parameters, fresh from a seed, that reads and writes single characters."""

from pathlib import Path

from antiphon.learning.model.tiny import make_tokenizer, write_tiny_model

CHARACTERS = "0123456789+=,:"


def build(directory: Path | str, seed: int = 0) -> None:
    """Write the model and its tokenizer to `directory`."""
    write_tiny_model(directory, seed, make_tokenizer(CHARACTERS))
