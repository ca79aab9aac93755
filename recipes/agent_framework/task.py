"""Products of two numbers of two digits, which the policy can guess, or work out with a calculator and repeat."""

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from antiphon.core.types import Message, Prompt
from antiphon.tasks.splits import split_of

CALL = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{}"}}}}\n</tool_call>'


def problems(split: str) -> Iterator[dict[str, Any]]:
    """The problems of a split; none is in two."""
    for a, b in product(range(10, 100), repeat=2):
        question = f"{a}*{b}"
        if split_of(question) == split:
            yield {"id": question, "prompt": question, "answer": str(a * b)}


def examples(split: str) -> Iterator[Prompt]:
    """How one may begin: half of them call the calculator, half guess, and are wrong; and how one goes on from a call."""
    for row in problems(split):
        question = Message("user", row["prompt"])
        call, result = CALL.format(row["prompt"]), row["answer"]
        guess = str(
            int(result) + random.Random(row["prompt"]).choice([-1, 1]) * random.Random(result).randrange(1, 100)
        )
        called = (question, Message("assistant", call), Message("tool", result))
        for name, messages, response in (
            ("call", (question,), call),
            ("guess", (question,), guess),
            ("repeat", called, result),
        ):
            yield Prompt(id=f"{row['id']} {name}", task="", messages=messages, payload={"response": response})


def right(prompt: Prompt, transcript: Any) -> float:
    """1 if the agent came to the product, else 0."""
    return float(transcript.result == prompt.payload["answer"])
