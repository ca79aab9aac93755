"""Two-digit addition with the column sums first: `37+45=` is answered `12,8:82`.

12 is the sum of the units, 8 that of the tens with the carry, 82 the answer.
"""

from collections.abc import Iterator

from antiphon.tasks.splits import check_split, split_of


def problems(split: str) -> Iterator[dict[str, str]]:
    """The problems of one split: about 6,480 for training, 810 each for validation and test; none is in two.

    `answer` is the whole response, the sums included, and `response` the same for supervised training."""
    check_split(split)
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
