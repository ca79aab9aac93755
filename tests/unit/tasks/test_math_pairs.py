r"""Hard pairs for the mathematical reward: what the right answer is, what was boxed, and whether that is right.

Where a verdict is a matter of policy, the reward's docstring says so.
"""

import asyncio

import pytest

from antiphon.tasks.base import Transcript
from antiphon.tasks.config import GradingConfig
from antiphon.tasks.grading import GradingPool
from antiphon.tasks.rewards.math import Math
from antiphon.types import Message, Prompt, Score
from antiphon.waits import Waits

RIGHT = [
    # numbers
    ("1/2", r"\frac12"),
    ("1/2", ".5"),
    ("0.5", r"\tfrac{1}{2}"),
    ("-1/2", r"\frac{1}{-2}"),
    ("-5", "−5"),  # a minus of typographers
    ("-5", "–5"),  # a dash
    ("5", "+5"),
    ("5", "5."),
    ("0", "-0"),
    ("1000", "1,000"),
    ("1000", "1{,}000"),
    ("1234", r"1\,234"),
    ("1234567", "1 234 567"),
    ("1000", "10^3"),
    ("1000", "1e3"),
    (r"6.02\times10^{23}", "6.02e23"),
    ("3/2", "1 1/2"),
    ("3/2", r"1\frac{1}{2}"),
    ("1/3", r"0.\overline{3}"),
    ("1", r"0.\overline{9}"),
    ("7/6", r"1.1\overline{6}"),
    ("1/3", "0.3333333"),
    ("1/2", r"50\%"),
    (r"50\%", "0.5"),
    ("50", r"50\%"),
    ("10110_2", "10110"),
    ("2/3", "2:3"),
    # values of expressions
    ("82", "37+45"),
    ("120", "5!"),
    ("10", r"\binom{5}{2}"),
    ("3", r"\log_2 8"),
    (r"\ln 4", r"2\ln 2"),
    ("5", r"\left|-5\right|"),
    ("5", r"\lfloor 5.5\rfloor"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\sqrt{2}/2", r"\frac{1}{\sqrt{2}}"),
    ("3", r"\sqrt{9}"),
    ("1/3", r"\frac{1}{3}\approx 0.333"),
    ("3+4i", "4i+3"),
    # variables
    ("(x+1)^2", "x^2+2x+1"),
    ("x^2-1", "(x-1)(x+1)"),
    (r"\sin^2x+\cos^2x", "1"),
    (r"\frac{\pi}{6}+2k\pi", r"2\pi k+\frac{\pi}{6}"),
    ("y=2x+1", "y-2x=1"),
    ("y=2x+1", "2x+1"),
    ("5", "x=5"),
    ("x=5", "5"),
    # several numbers
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\{1,2\}", "1,2"),
    ("1,2", r"1\text{ and }2"),
    (r"\pm 2", "2,-2"),
    ("(1,2)", r"\left(1, 2.0\right)"),
    ("(1,2)", "(x,y)=(1,2)"),
    (r"(1,2)\cup(3,4)", r"(3,4)\cup(1,2)"),
    ("x>3", r"(3,\infty)"),
    (r"(-\infty,-2)", r"x\in(-\infty,-2)"),
    (r"\begin{pmatrix}1/2\\2\end{pmatrix}", r"\begin{bmatrix}0.5\\2\end{bmatrix}"),
    (r"\infty", r"\infty"),
    (r"\emptyset", r"\{\}"),
    # units and text
    ("5", r"5\text{ cm}"),
    ("5", r"\$5.00"),
    (r"90^\circ", "90"),
    (r"\text{yes}", "Yes"),
    ("(B)", r"\textbf{(B)}"),
    ("12:30", "12:30"),
]
WRONG = [
    # near misses
    ("1/3", "0.333"),
    (r"\pi", "3.14159"),
    (r"\pi", "22/7"),
    ("5", "4.999999999"),
    ("1000000", "1000001"),
    ("2", "2.0000000001"),
    ("5", "5,000"),
    ("1000", "1.000"),
    ("5", "5!"),
    ("5", "-5"),
    ("11/2", "1 1/2"),
    ("0.3", r"0.\overline{3}"),
    ("10110_2", "10110_3"),
    ("57", "5 7"),
    ("0.5", "50"),
    ("-3", r"\sqrt{9}"),
    ("3+4i", "3-4i"),
    (r"2^{1000000}", "1"),
    # several answers at once
    ("5", "5 or 7"),
    ("7", "5 or 7"),
    ("5", r"5\text{ or }7"),
    ("5", "5, 7"),
    ("5", "5;7"),
    ("3", r"\pm3"),
    ("3", r"3\text{ or }-3"),
    ("5", r"x=5\text{ or }x=7"),
    ("5", "x=5, y=3"),
    ("2,3", "2"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("B", "A, B"),
    (r"D", r"\text{D or E}"),
    # what says nothing
    ("5", "5=5"),
    ("5", "7=5"),
    ("5", "x"),
    ("5", "x<6"),
    ("5", ""),
    ("5", "?"),
    ("5", "five"),
    ("(0,1)", r"\mathbb{R}"),
    (r"(3,\infty)", "2x+1>7"),  # the question
    # order and brackets
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    (r"(-\infty,3)", r"(-\infty,3]"),
    ("x>3", r"x\ge 3"),
    (r"(1,2)\cup(3,4)", "(1,4)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ("y=2x+1", "y=2x-1"),
    ("x=5", "y=5"),
    ("a/b", "b/a"),
    (r"\infty", r"-\infty"),
    ("12:30", "12:31"),
    ("B", "A"),
]


@pytest.fixture(scope="module")
def math() -> Math:
    return Math()


def judge(math: Math, right: str, boxed: str) -> Score:
    prompt = Prompt(id="p", task="t", messages=(), payload={"answer": right})
    return math(prompt, Transcript([Message("assistant", rf"So it is \boxed{{{boxed}}}.")]))


def test_there_are_a_hundred() -> None:
    assert len(RIGHT) + len(WRONG) >= 100


@pytest.mark.parametrize("right, boxed", RIGHT)
def test_what_is_right(math: Math, right: str, boxed: str) -> None:
    assert judge(math, right, boxed).value == 1


@pytest.mark.parametrize("right, boxed", WRONG)
def test_what_is_wrong(math: Math, right: str, boxed: str) -> None:
    assert judge(math, right, boxed).value == 0


@pytest.mark.parametrize(
    "boxed", ["37+45", "x=37+45", "2*41", r"\frac{164}{1+1}", r"\sqrt{6724}", r"|-82|", r"41\cdot2"]
)
def test_arithmetic_may_be_asked_to_be_done(math: Math, boxed: str) -> None:
    strict = Math(allow_arithmetic=False)
    assert judge(math, "82", boxed).value == 1
    assert judge(strict, "82", boxed).value == 0


@pytest.mark.parametrize(
    "right, boxed",
    [
        *(
            ("82", boxed)
            for boxed in ("82", "82.0", r"x=82", r"82\text{ cm}", r"\$82", r"\frac{164}{2}", r"8.2\times10^1")
        ),
        ("-1/2", r"-\frac12"),
        ("1.5", "1 1/2"),
        ("1234", "1{,}234"),
        ("1/3", r"0.\overline{3}"),
        ("0.5", r"50\%"),
        (r"2\sqrt{2}", r"2\sqrt{2}"),  # not rational
        ("x+1", "1+x"),
        ("B", "B"),
    ],
)
def test_numbers_are_no_arithmetic(right: str, boxed: str) -> None:
    assert judge(Math(allow_arithmetic=False), right, boxed).value == 1


BOMBS = [
    "9^{9^{9^9}}",
    "100000000!",
    "(x+1)^{3000}",
    "(" * 400 + "5" + ")" * 400,
    r"\int_0^1 \frac{\sin(x^3)\ln(1+x^5)}{\sqrt{1+x^7}}\,dx",
]


def test_time_bombs_are_ungraded_within_the_deadline_and_nothing_else_is() -> None:
    async def run() -> list[Score]:
        async with GradingPool({"t": ("math", {})}, GradingConfig(workers=2, deadline=2.0), Waits()) as pool:
            prompt = Prompt(id="p", task="t", messages=(), payload={"answer": "5"})
            said = [text for bomb in BOMBS for text in ("5", bomb)]
            transcripts = [Transcript([Message("assistant", rf"\boxed{{{text}}}")]) for text in said]
            return await asyncio.gather(*(pool.score(prompt, transcript) for transcript in transcripts))

    scores = asyncio.run(run())
    assert [score.value for score in scores[::2]] == [1.0] * len(BOMBS)
    for bomb, score in zip(BOMBS, scores[1::2], strict=True):
        assert score.value is None, (bomb, score)
