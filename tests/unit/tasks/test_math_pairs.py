r"""Hard pairs for the mathematical reward: what the right answer is, what was boxed, and whether that is right.

Where a verdict is a matter of policy, the reward's docstring says so.
"""

import sys
from typing import Any

import pytest

from antiphon.core.types import Message, Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.math.reward import Math

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
    (r"\ln 4", r"2\ln 2"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\sqrt{2}/2", r"\frac{1}{\sqrt{2}}"),
    ("1/3", r"\frac{1}{3}\approx 0.333"),
    ("3+4i", "4i+3"),
    # variables
    ("(x+1)^2", "x^2+2x+1"),
    ("x^2-1", "(x-1)(x+1)"),
    (r"\sin^2x+\cos^2x", "1"),
    (r"\frac{\pi}{6}+2k\pi", r"2\pi k+\frac{\pi}{6}"),
    ("y=2x+1", "y-2x=1"),
    ("y=2x+1", "2x+1"),
    (r"y=\frac{2}{3}x+1", "2x-3y+3=0"),
    ("3x+6y=12", "x+2y=4"),
    ("x=3y", "y=x/3"),
    ("5", "x=5"),
    ("x=5", "5"),
    # several numbers
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\{1,2\}", "1,2"),
    ("1,2", r"1\text{ and }2"),
    ("x=1,y=2", "y=2, x=1"),
    ("x=1,y=2", "1,2"),
    ("x=1,y=2", "(1,2)"),
    (r"x=2\text{ or }x=3", "3,2"),
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
    (r"5\text{ cm}", "5 cm"),
    (r"5\text{ cm}", "5"),
    ("5 m", r"500\text{ centimeters}"),
    ("2 hours", "120 min"),
    (r"9\text{ m}^2", r"90000\,\text{cm}^2"),
    ("5", r"5\text{ cm}"),
    ("5", r"\$5.00"),
    (r"90^\circ", "90"),
    (r"\text{yes}", "Yes"),
    ("(B)", r"\textbf{(B)}"),
    ("12:30", "12:30"),
    # unusual notations
    ("1/2", "½"),
    ("3/2", "1½"),
    ("1/2", r"\nicefrac{1}{2}"),
    ("1/2", r"{1 \over 2}"),
    ("1/3", r"0.\bar3"),
    ("1/3", r"0.\dot{3}"),
    ("7/6", "1.1(6)"),
    ("4/33", r"0.\dot1\dot2"),
    ("10000", "10\N{THIN SPACE}000"),
    ("3000000", r"3\text{ million}"),
    (r"3\text{ million}", "3,000,000"),
    ("0.00025", "2.5 × 10⁻⁴"),
    ("0.5", r"50\text{ percent}"),
    ("0.5", r"50\text{\%}"),
    (r"\sqrt[3]{2}", "∛2"),
    (r"2\sqrt{3}", "√12"),
    (r"\frac{\sqrt{3}}{2}", r"\sqrt{3/4}"),
    ("e^2", r"\exp(2)"),
    ("3+4i", r"3+4\mathrm{i}"),
    ("|x|", r"\lvert x\rvert"),
    (r"\arcsin x", r"\sin^{-1}x"),
    ("(1,2)", r"\langle1,2\rangle"),
    ("(1,2)", r"\bigl(1,2\bigr)"),
    ("(1,2)", "y=2, x=1"),
    (r"\{1,2\}", r"\lbrace1,2\rbrace"),
    (r"\{1,2\}", r"x=1\text{ or }x=2"),
    (r"\{1,2\}", "x_1=1,x_2=2"),
    ("(0,1)", "]0,1["),
    (r"[0,1)\cup(2,\infty)", r"[0,1[\cup]2,\infty["),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"(-\infty,\infty)", "ℝ"),
    (r"\emptyset", "∅"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\[2pt] 2 \end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\left(\begin{smallmatrix}1\\2\end{smallmatrix}\right)"),
    ("5 cm", "5cm"),
    ("5 m/s", r"5\text{ meters per second}"),
    (r"5\text{ cm}^2", "5 cm²"),
    (r"5\text{ cm}^2", r"5\text{ square centimeters}"),
    ("5", "f(2)=5"),
    ("5", r"\overline{AB}=5"),
    ("2:1", "2 : 1"),
]
# Right only where a task says that values may be left to be computed: else the question would be an answer to itself.
UNFINISHED = [
    ("82", "37+45"),
    ("120", "5!"),
    ("10", r"\binom{5}{2}"),
    ("3", r"\log_2 8"),
    ("5", r"\left|-5\right|"),
    ("5", r"\lfloor 5.5\rfloor"),
    ("3", r"\sqrt{9}"),
    ("82", "2*41"),
    ("82", "x=37+45"),
    ("82", r"\frac{164}{1+1}"),
    ("82", r"\frac{164}{2}"),
    ("82", r"41\cdot2"),
    ("82", r"|-82|"),
    ("1/2", r"\sin(\pi/6)"),
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
    # the question again
    ("82", r"\{37+45\}"),
    ("82", r"\int_0^{37}1dx+45"),
    ("82", r"\lim_{x\to 37}(x+45)"),
    ("82", r"\sum_{k=1}^{82}1"),
    ("82", r"\prod_{k=1}^{1}82"),
    ("82", r"\{n : n = 37+45\}"),
    ("82", r"\{n \mid n = 37+45\}"),
    ("82", "37+45=82=37+45"),
    ("82", "(37+45)"),
    ("82", "37 + 45 cm"),
    ("82", r"\frac{37+45}{1}"),
    ("82", "37--45"),
    ("82", "164/2*1"),
    ("82", "x=37+45"),
    ("82", "8_2"),
    ("1024", "2^{10}"),
    ("12", "3\\cdot 4"),
    (r"5\sqrt{2}", r"\sqrt{8}+3\sqrt{2}"),
    (r"\sqrt{6}", r"\sqrt{2}\cdot\sqrt{3}"),
    (r"6\sqrt{2}", r"2\cdot3\sqrt{2}"),
    (r"\sqrt{3}/2", r"\sin(\pi/3)"),
    ("2x", r"\frac{d}{dx}x^2"),
    ("x^2/2", r"\int x\,dx"),
    # equations that state anything
    ("5", "x=7=5"),
    ("5", "7=x=5"),
    ("5", r"5\approx 7"),
    ("5", r"7\approx 5"),
    ("5", r"5\ne 7"),
    ("5", r"x\le 5"),
    ("5", r"4<5<6"),
    ("5", r"x\in\{5,7\}"),
    # units
    (r"5\text{ cm}", r"5\text{ m}"),
    ("5 cm", "5 m"),
    (r"5\text{ cm}^2", r"5\text{ cm}^3"),
    (r"\$5", r"5\text{ cents}"),
    (r"5\text{ apples}", r"5\text{ oranges}"),
    # other digits, and none
    ("82", "٨٢"),
    ("82", "８２"),
    ("5", "V"),
    (r"\{\}", ""),
    (r"\frac{1}{23}", r"\frac{12}{3}"),
    ("1/23", "12/3"),
    # order and brackets
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("x=1,y=2", "(2,1)"),
    ("x=1,y=2", "2,1"),
    ("x=1,y=2", r"\{\}"),
    ("a=2,b=5", r"\{5,2\}"),
    ("a=2,b=5", "b=5, 5"),
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
    # words that are no units
    ("82", r"82\text{ is wrong}"),
    ("82", r"82\text{ or more}"),
    ("82", r"82\text{ dozen}"),
    ("82", r"82\text{ million}"),
    (r"82\text{ million}", "82"),
    ("82", r"82\text{ squared}"),
    ("82", r"82\text{83}"),
    ("82", r"82\text{-}"),
    ("5", r"5\text{" + "a " * 400 + "}"),
    (r"90^\circ", r"90\%"),
    ("5 mg", "5 Mg"),
    ("5 MW", "5 mW"),
    (r"5\text{ cm}^2", r"5\text{ centimeters}"),
    # other objects, other readings
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
    (r"\{1,2\}", r"\{1,\{2\}\}"),
    ("x+1", "x=x+1"),
    ("(1,2)", "x=2, y=1"),
    (r"\frac{1}{\sin x}", r"\sin^{-1}x"),
    (r"\sqrt{2}", r"\sqrt{4/2}"),
    ("[0,1]", "]0,1["),
    ("10", "√12"),
    (r"\infty", r"\infty+1"),
    (r"\infty", r"2\infty"),
    (r"\infty", r"-(-\infty)"),
    ("3", r"\frac{12}{4}"),
    ("7/2", r"1\frac52"),
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


def test_an_improper_fraction_behind_a_number_is_neither() -> None:
    """A sum to some readers, a product to others."""
    for boxed in (r"37\frac{45}{1}", "37 45/1", r"37\tfrac{90}{2}", r"41\frac{82}{2}", r"41\frac{4}{2}"):
        assert [judge(Math(allow_arithmetic=allowed), "82", boxed).value for allowed in (False, True)] == [0, 0]


@pytest.mark.parametrize("right, boxed", UNFINISHED)
def test_only_a_task_lets_values_be_left_to_compute(math: Math, right: str, boxed: str) -> None:
    assert judge(math, right, boxed).value == 0
    assert judge(Math(allow_arithmetic=True), right, boxed).value == 1


@pytest.mark.parametrize(
    "right, boxed",
    [
        *(("82", boxed) for boxed in ("82", "82.0", r"x=82", r"82\text{ cm}", r"\$82", r"8.2\times10^1")),
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
    assert judge(Math(), right, boxed).value == 1


BOMBS = [
    "9^{9^{9^9}}",
    "9^{9^9}",
    "100000000!",
    "((9!)!)!",
    "(x+1)^{3000}",
    "(" * 5000 + "5" + ")" * 5000,
    r"\frac{" * 5000,
    "{" * 300 + "5" + "}" * 300,
    "-" * 900 + "5",
    "7" * 2_000_000,
    "1." + "3" * 900,
    "e^{" * 20 + "9" + "}" * 20,
    r"\sqrt[100]{" * 12 + "9^{99999}" + "}" * 12,
    r"\binom{1000}{500}" * 20,
    r"\prod_{k=1}^{10^9}k",
    r"\sum_{k=1}^{10^{9}}\frac{1}{k}",
    r"\int_0^1 \frac{\sin(x^3)\ln(1+x^5)}{\sqrt{1+x^7}}\,dx",
    r"\sin(10^{99999})",
    r"\boxed{" * 50_000,
    "x^{99999}" * 30,
    r"\exp(\exp(\exp(\exp(9))))",
    "1e999999999",
    "5," * 150,
    r"\{" * 24 + "5" + r"\}" * 24,
    "x" * 290,
    "7" + "%" * 290,
    "7" + "!" * 290,
    "x/x*" * 70 + "x",
    r"\pm1" * 60,
    "1." + "1" * 400 + r"\overline{" + "3" * 500 + "}",
    "7 " + "million " * 100,
    "½" * 100,
    "√" * 200 + "7",
    "]" * 400 + "0,1" + "[" * 400,
]
GOLDS = [
    "5",
    "x+1",
    r"\sqrt{2}",
    r"\{1,2\}",
    r"(1,\infty)",
    r"\ln 2+9^{9}",
    "y=2x+1",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
]


class Work:
    """Counts calls of Python functions: what a verdict costs, whatever the machine does beside it."""

    def __enter__(self) -> "Work":
        self.calls = 0
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call"


@pytest.mark.parametrize("allowed", [False, True])
def test_a_bomb_is_worth_nothing_and_little_work(allowed: bool) -> None:
    """For whatever kind of right answer."""
    reward = Math(allow_arithmetic=allowed)
    for right in GOLDS:
        for bomb in BOMBS:
            with Work() as work:
                score = judge(reward, right, bomb)
            assert score.value == 0 and work.calls < 30_000, (right, bomb[:40], score, work.calls)


COSTLY = {  # right answers that the library compares, and what costs it seconds
    r"\tan^{-1}(\frac{y'}{x'})+\frac{d}{dx}f(x)": [
        r"\frac{(x+y)^{99}}{(x-y)^{99}}",
        r"\frac{d}{dx}\tan\tan\tan\tan\tan x",
    ],
    r"\lim_{x\to 0}\frac{\sin x}{x}+a": [r"\sin\sin\sin\sin\sin\sin x"],
    r"\prod_{k=1}^n (1+x^k)": [r"\prod_{k=1}^{99} (1+x^k)"],
    "5 ft 3 in": ["(x+1)^{99}"],
}


@pytest.mark.parametrize(("right", "bombs"), COSTLY.items())
def test_bombs_are_kept_from_the_library(math: Math, right: str, bombs: list[str]) -> None:
    assert judge(math, right, "7").value == 0  # reads the right answer, which is then remembered
    for bomb in bombs:
        with Work() as work:
            score = judge(math, right, bomb)
        assert score.value == 0 and work.calls < 1_000, bomb
