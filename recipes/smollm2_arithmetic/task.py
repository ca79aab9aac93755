"""Addition of numbers below 100, from Reasoning Gym, put to a small chat model in a form that it can follow.

Asked outright, SmolLM2-135M hardly ever answers a sum with its result. Shown two turns that repeat the sum before the
result it does so for about a third of the problems: enough to learn from, and in a dozen tokens.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from antiphon.tasks.sources import reasoning_gym

SHOWN = {"3 + 4": "7", "25 + 11": "36"}


def problems(split: str, size: int = 1000, seed: int = 0) -> Iterator[dict[str, Any]]:
    """`size` different problems of one split; the splits share none. A row is one of Reasoning Gym's with a conversation
    as its prompt, and in `response` the right one for supervised training."""
    rows = reasoning_gym(
        split,
        "basic_arithmetic",
        size=size + len(SHOWN),
        seed=seed,
        min_terms=2,
        max_terms=2,
        min_digits=1,
        max_digits=2,
        operators=["+"],
        allow_parentheses=False,
        allow_negation=False,
    )
    unseen = (row for row in rows if row["metadata"]["expression"] not in SHOWN)
    for row in islice(unseen, size):
        expression = row["metadata"]["expression"]
        yield {**row, "prompt": converse(expression), "response": f"{expression} = {row['answer']}"}


def converse(expression: str) -> list[dict[str, str]]:
    """The shown turns, then the question."""
    messages = []
    for shown, result in SHOWN.items():
        messages.append({"role": "user", "content": f"{shown} ="})
        messages.append({"role": "assistant", "content": f"{shown} = {result}"})
    return [*messages, {"role": "user", "content": f"{expression} ="}]
