"""Every dataset of Reasoning Gym, and answers that are not: none is paid, none runs, and the right one still is."""

import builtins
import time

import pytest
from reasoning_gym.factory import DATASETS

from antiphon.core.types import Message
from antiphon.tasks.base import Transcript
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.prompts import load_prompts
from antiphon.tasks.rewards.reasoning_gym import reasoning_gym

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
