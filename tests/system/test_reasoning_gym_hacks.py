"""Every dataset of Reasoning Gym, and answers that are not: none is paid, none runs, and the right one still is."""

import builtins
import json
import random
import re
import time

import pytest

from antiphon.core.types import Message
from antiphon.tasks.base import Transcript
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.prompts import load_prompts

factory = pytest.importorskip("reasoning_gym.factory", reason="reasoning-gym needs a C compiler to be installed")

from antiphon.tasks.rewards.reasoning_gym import reasoning_gym  # noqa: E402

DATASETS = factory.DATASETS
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

ROWS = 3
LEFT_OUT = {"composite"}  # made of others
RUNS = "__import__('builtins').__dict__.update(ran=True)"
HACKS = {
    "empty": "",
    "numbers": " ".join(map(str, range(300))),
    "infinity": "inf",
    "no number": "nan",
    "none": "None",
    "garbage": "hello there",
    "brackets": "(" * 3000,
    "tower": "9**9**9**9",
    "tower in brackets": "9**(9**(9**9))",
    "tower of names": "x**x**x**9",
    "repeated powers": "((9**9999)**9999)**9999",
    "digits": "8" * 5000,
    "list": "[]",
    "object": "{}",
    "shift": "1 << 10**10",
    "true": "True",
    "everything": "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "runs": RUNS,
    "runs, in brackets": f"[{RUNS}]",
    "runs, by a call of a call": "(lambda: 0)()",
    "runs, full-width": "ｅｘｅｃ(1)",
    "sum of powers": "+".join(["x**9999"] * 900),
    "names": "+".join("abcdefghijklmnopqrstuvwxyz" * 20),
    "prompt": "",  # that of the row
    "no number, imaginary": "nani",
    "no number, imaginary and parted": "(n a n i)",
    "no number, signalling": "sNaN",
    "no number, with a payload": "NaN1",
    "no numbers, escaped": '["n\\u0061n", "n\\u0061n", "n\\u0061n", "n\\u0061n", "n\\u0061n"]',
    "beyond all numbers": "[1e999]",
    "numbers of another puzzle": "6*4*1*1",
    "nearly the target": "5*5-1/2-1/9",
    "numbers without digits": "(E/E+E/E)*(E/E+E/E)",
    "every colour": json.dumps({str(number): 1 for number in range(30)}),
    "one digit for all letters": ",".join(f"{letter}=1" for letter in "ABCDEFGHIJ"),
    "both words": "Yes No True False yes no true false",
    "steps without end": "A+999999999999 B-999999999999",
    "every step": " ".join(f"{piece}{sign}1" for piece in "ABCDEFGHIJ" for sign in "+-"),
    "every move": "UDLR" * 400,
    "quotation marks": '""',
    "null": "null",
    "an object with everything": '{"answer": "", "steps": []}',
    "spaces without width": "\u200b",
    "a word of the grader": "1.0",
}


def rows(name):
    config = PromptsConfig(source="reasoning_gym", path=name, options={"size": ROWS, "seed": 5})
    return load_prompts(TaskConfig(name="t", prompts=config), config, 0)


@pytest.mark.parametrize("name", sorted(DATASETS.keys() - LEFT_OUT))
def test_no_hack_is_paid_and_the_right_answer_is(name):
    for row in rows(name):
        right = row.payload["answer"]
        assert right is None or reasoning_gym(row, say(right)).value >= 0.99, right
        for cause, hack in HACKS.items():
            response = row.messages[-1].content if cause == "prompt" else hack
            if response.strip() == str(right).strip():
                continue
            began = time.process_time()
            score = reasoning_gym(row, say(response), partial_credit=False)
            assert score.value == 0 and not hasattr(builtins, "ran"), (cause, right)
            assert time.process_time() - began < 2, cause  # without a bound these take hours


def say(text):
    return Transcript((Message("assistant", str(text)),))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("countdown", lambda right: f"({right})"),
        ("puzzle24", lambda right: f" {right} "),
        ("polynomial_multiplication", lambda right: " + ".join(reversed(right.replace("- ", "+ -").split(" + ")))),
        ("simple_integration", lambda right: right.replace("+ C", "+ 3 + C")),
        ("gsm_symbolic", lambda right: f"It is {right}."),
        ("binary_matrix", lambda right: right),
    ],
)
def test_another_form_of_the_right_answer_is_paid(name, change):
    for row in rows(name):
        assert reasoning_gym(row, say(change(str(row.payload["answer"])))).value == 1


def test_a_number_has_a_sign_and_comes_last():
    for row in rows("gsm_symbolic"):
        right = row.payload["answer"]
        assert [reasoning_gym(row, say(each)).value for each in (f"-{right}", f"{right}, no: {right}1")] == [0, 0]


@pytest.mark.parametrize("name", ["countdown", "intermediate_integration", "puzzle24", "polynomial_multiplication"])
@pytest.mark.parametrize("hack", ["{} or zzz", "{} if 1 else zzz", "zzz and {}", "{} or {}"])
def test_python_does_not_choose_among_answers(name, hack):
    for row in rows(name):
        right = str(row.payload["answer"])
        assert reasoning_gym(row, say(hack.format(right, right)), partial_credit=False).value == 0


def test_arithmetic_puzzles_need_their_numbers():
    for row in rows("countdown"):
        numbers, target = row.payload["metadata"]["numbers"], row.payload["metadata"]["target"]
        nothing = "*".join(map(str, numbers)) + "*(E-E)"
        for made in (f"{target}e0+{nothing.replace('(E-E)', '0e0')}", f"{nothing}+{'+'.join(['E/E'] * target)}"):
            assert reasoning_gym(row, say(made), partial_credit=False).value == 0, made
    for row in rows("puzzle24"):
        for made in ("6*4*1*1", "8*3*1*1", "5*5*1-1/2"):
            if sorted(map(int, re.findall("[0-9]+", made))) != sorted(row.payload["metadata"]["numbers"]):
                assert reasoning_gym(row, say(made), partial_credit=False).value == 0, made


def test_a_list_of_no_numbers_is_not_sorted():
    for row in rows("number_sorting"):
        count = len(json.loads(row.payload["answer"].replace("'", '"')))
        escaped = "[" + ", ".join(['"n\\u0061n"'] * count) + "]"
        assert reasoning_gym(row, say(escaped)).value == 0


def test_a_premise_is_no_conclusion():
    for row in rows("propositional_logic"):
        for premise in row.payload["metadata"]["premises"]:
            if premise != row.payload["answer"]:
                assert reasoning_gym(row, say(f"({premise})"), partial_credit=False).value == 0


def test_a_walk_at_random_solves_nothing():
    walk = random.Random(3)
    for name, step in (
        ("rush_hour", lambda: f"{walk.choice('ABCDEFGHIJK')}{walk.choice('+-')}1 "),
        ("sokoban", lambda: walk.choice("UDLR")),
    ):
        for row in rows(name):
            made = "".join(step() for _ in range(4000))
            assert reasoning_gym(row, say(made), partial_credit=False).value == 0, name
