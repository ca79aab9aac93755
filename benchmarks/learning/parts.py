"""Countdown with three numbers for a model of characters, and the models that `learning.py` trains.

`4,21,25>42=` asks for 42 from 4, 21 and 25 by sums and differences, each used once, and is answered a step at a time:
`25-4=21,21+21=42`.
"""

import random
import re
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import model  # of recipes/tiny_arithmetic

from antiphon.learning.model.tiny import make_tokenizer, write_tiny_model
from antiphon.tasks.splits import split_of

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b}
STEP = re.compile(r"(\d+)([+-])(\d+)=(\d+)")
HIGHEST = 30  # number: 15,000 problems to train on, so that few are learned by heart


def build_small(directory: Path | str, seed: int = 0) -> None:
    """A critic's beginning: an eighth of the actor's parameters."""
    write_tiny_model(directory, seed, make_tokenizer(model.CHARACTERS), hidden_size=64, layers=2)


def build_countdown(directory: Path | str, seed: int = 0) -> None:
    """The recipe's model, with more characters."""
    write_tiny_model(directory, seed, make_tokenizer(model.CHARACTERS + "->"))


def problems(split: str) -> Iterator[dict[str, str]]:
    """All three numbers up to `HIGHEST` with all targets that they reach; `response` is one way."""
    for a in range(1, HIGHEST + 1):
        for b in range(a, HIGHEST + 1):
            for c in range(b, HIGHEST + 1):
                for target, ways in sorted(reached((a, b, c)).items()):
                    prompt = f"{a},{b},{c}>{target}="
                    if split_of(prompt) == split:
                        response = random.Random(prompt).choice(ways)
                        yield {"id": prompt, "prompt": prompt, "answer": str(target), "response": response}


def reached(numbers: tuple[int, ...]) -> dict[int, list[str]]:
    """Every target, and the answers that lead there; no step comes below 0."""
    found: dict[int, list[str]] = {}
    for a, b, c in sorted(set(permutations(numbers))):
        for first, one in OPERATIONS.items():
            for second, two in OPERATIONS.items():
                between = one(a, b)
                target = two(between, c)
                if between >= 0 < target:
                    found.setdefault(target, []).append(f"{a}{first}{b}={between},{between}{second}{c}={target}")
    return found


def countdown(prompt, transcript) -> float:
    """1 if two steps that are right use each number once and end at the target, else 0."""
    asked, _, target = prompt.messages[-1].content.rstrip("=").partition(">")
    left, steps = sorted(asked.split(",")), transcript.response.split(",")
    for number, step in enumerate(steps):
        found = STEP.fullmatch(step)
        if found is None or len(steps) != 2:
            return 0.0
        a, sign, b, result = found.groups()
        if OPERATIONS[sign](int(a), int(b)) != int(result):
            return 0.0
        for used in (a, b):
            if used not in left:
                return 0.0
            left.remove(used)
        left.append(result)
        if number == 1:
            return float(left == [target])
    return 0.0
