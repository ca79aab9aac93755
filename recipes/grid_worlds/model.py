"""The model of tiny_arithmetic, smaller, with the characters of boards."""

import runpy
from pathlib import Path

CHARACTERS = "_/#PGHXS√UDLR"
TINY = runpy.run_path(str(Path(__file__).parents[1] / "tiny_arithmetic" / "model.py"))


def build(directory: Path | str, seed: int = 0) -> None:
    """Write the model and its tokenizer to `directory`."""
    TINY["build"](directory, seed, characters=CHARACTERS, hidden_size=96)
