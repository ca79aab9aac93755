"""Three kinds of problem for a model of characters, each judged in a way of its own.

math         `37+45=` is answered `12,8:82`: the sum of the units, that of the tens, the answer, which alone counts
code         `add 5, double=` is answered with a function, such as `lambda x:(x+5)*2`: it is run, any that does the same counts.
             Supervised examples have the two operations in either order, whatever was asked
instruction  `say cat 3 times, not dog, at most 4 words=`: whether a text does as it is told is checked, not what else it says.
             Supervised examples say the word once to four times, whatever was asked
"""

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from antiphon.tasks.splits import split_of

OPERATIONS = {"double": "({})*2", "triple": "({})*3", "negate": "-({})", "square": "({})**2"}
OPERATIONS |= {f"add {n}": f"({{}})+{n}" for n in range(1, 10)} | {f"take {n}": f"({{}})-{n}" for n in range(1, 10)}
WORDS = ["ant", "bat", "bee", "cat", "cow", "dog", "eel", "elk", "emu", "fox", "hen", "jay", "owl", "pig", "rat", "yak"]
INPUTS = (-3, 0, 2, 7)


def math(split: str) -> Iterator[dict[str, Any]]:
    """Two-digit additions."""
    for a, b in product(range(10, 100), repeat=2):
        units = a % 10 + b % 10
        prompt, response = f"{a}+{b}=", f"{units},{a // 10 + b // 10 + units // 10}:{a + b}"
        if split_of(prompt) == split:
            yield {"id": f"math/{prompt}", "prompt": prompt, "answer": str(a + b), "response": response}


def code(split: str) -> Iterator[dict[str, Any]]:
    """Two operations, one after the other."""
    for (first, one), (second, two) in product(OPERATIONS.items(), repeat=2):
        prompt, bodies = f"{first}, {second}=", (_body(one, two), _body(two, one))
        if split_of(prompt) == split:
            expected = {x: eval(bodies[0], {"x": x}) for x in INPUTS}
            tests = [f"assert f({x}) == {value}" for x, value in expected.items()]
            response = f"f=lambda x:{random.Random(prompt).choice(bodies)}"
            yield {"id": f"code/{prompt}", "prompt": prompt, "tests": tests, "response": response}


def _body(one: str, two: str) -> str:
    return two.format(one.format("x").replace("(x)", "x"))


def instruction(split: str) -> Iterator[dict[str, Any]]:
    """A word so many times, another never, and not too long."""
    for word, never, times, spare in product(WORDS, WORDS, range(1, 4), range(2)):
        prompt = f"say {word} {times} times, not {never}, at most {times + spare} words="
        if word != never and split_of(prompt) == split:
            yield {
                "id": f"instruction/{prompt}",
                "prompt": prompt,
                "instruction_id_list": [
                    "keywords:frequency",
                    "keywords:forbidden_words",
                    "length_constraints:number_words",
                ],
                "kwargs": [
                    {"keyword": word, "frequency": times, "relation": "at least"},
                    {"forbidden_words": [never]},
                    {"num_words": times + spare + 1, "relation": "less than"},
                ],
                "response": " ".join([word] * random.Random(prompt).randint(1, 4)),
            }
