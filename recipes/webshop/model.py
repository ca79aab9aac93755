"""The model of tiny_arithmetic, smaller, with tokens for words of the shop: with the space before them, and without it."""

from pathlib import Path

from antiphon.learning.model.tiny import make_tokenizer, write_tiny_model

PATTERN = r" ?(?:[A-Za-z]+\d*|[^A-Za-z ]\d*)"
WORDS = [
    *("hat", "mug", "bag", "sock", "vest", "lamp", "soft", "warm", "thin", "neat"),
    *("red", "blue", "tan", "pink", "s", "m", "l", "to"),
    *("search", "click", "back", "next", "prev", "buy", "now", "nothing", "found"),
    *("This", "is", "no", "action", "Not", "here"),
    *(f"{shelf}{place}" for shelf in "abc" for place in range(1, 10)),
    *(f"${price}" for price in range(81)),
    *"[](),.<>\n",
]


def build(directory: Path | str, seed: int = 0) -> None:
    """Write the model and its tokenizer to `directory`."""
    tokens = [space + word for word in WORDS for space in ("", " ")]
    write_tiny_model(directory, seed, make_tokenizer(tokens, PATTERN), hidden_size=96, layers=3)
