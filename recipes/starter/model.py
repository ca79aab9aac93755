"""The model of this project: random weights, one token a character. A model of yours needs no such file."""

from pathlib import Path

from antiphon.learning.model.tiny import make_tokenizer, write_tiny_model


def build(directory: Path | str, seed: int = 0) -> None:
    """Write the model and its tokenizer to `directory`."""
    write_tiny_model(directory, seed, make_tokenizer("0123456789+=,:"))
