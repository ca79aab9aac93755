"""Two-digit addition with the column sums first: `37+45=` is answered `12,8:82`.

12 is the sum of the units, 8 that of the tens with the carry, 82 the answer.
"""

from collections.abc import Iterator

from antiphon.core.errors import DataError
from antiphon.tasks.splits import SPLITS, split_of


def problems(split: str) -> Iterator[dict[str, str]]:
    """The problems of one split: about 6,480 for training, 810 each for validation and test; none is in two.

    `answer` is the whole response, the sums included, and `response` the same for supervised training."""
    if split not in SPLITS:
        raise DataError(f"the splits are {', '.join(SPLITS)}, not {split!r}")
    for a in range(10, 100):
        for b in range(10, 100):
            prompt = f"{a}+{b}="
            if split_of(prompt) == split:
                response = respond(a, b)
                yield {"id": f"{a}+{b}", "prompt": prompt, "answer": response, "response": response}


def respond(a: int, b: int) -> str:
    """The right response to `a+b=`."""
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + units // 10
    return f"{units},{tens}:{a + b}"
