"""How the `math` reward agrees with the test set of math-verify, and with mathruler on it: each disagreement by its cause.

    python benchmarks/math_graders.py

Both are downloaded with pip: math-verify's sources, whose tests have the pairs, and mathruler with what it needs. A pair is a
right answer, an answer, and whether it is right. Where an answer stands in running text, what is compared is its last box, its
last formula, or what follows "answer is": to find an answer is not what is measured.
"""

import ast
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _common import table, write_result

from antiphon.tasks.rewards.extract import last_boxed
from antiphon.tasks.rewards.math.reward import compare_answers

MEASURES = (
    "antiphon.tasks.rewards.math",
    "antiphon.tasks.rewards.extract",
    "antiphon.tasks.rewards.math.answer_reader",
    "antiphon.tasks.rewards.math.answer_equality",
    "antiphon.tasks.rewards.math.answer_values",
    "antiphon.tasks.rewards.math.notation",
)
SETTINGS = {
    "ours": "the math reward's comparison with its defaults",
    "math-verify and mathruler": (
        "math-verify 0.9.0 by its own test set, mathruler 0.1.0 by its grade_answer, both with their defaults"
    ),
    "why their best": "each is given the answer by itself, so that finding it in running text counts for nobody",
}

VERIFY, RULER = "math-verify==0.9.0", ("mathruler==0.1.0", "pylatexenc==2.11")
SECONDS = 5  # for an answer that mathruler does not come to an end with
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)

Pair = tuple[str, str, bool]

CAUSES = {  # the first that matches
    "the answer is to be found in running text, in several formulas or several boxes": lambda gold, given: any(
        re.search(r"[A-Za-z]{3,}", FORMULA.sub("", text)) or text.count("boxed") > 1 or len(FORMULA.findall(text)) > 1
        for text in (gold, given)
    ),
    "a division that is still to be done": lambda gold, given: bool(re.search(r"\\frac\s*(\d)\{?\1\b", given)),
    "a line break within $": lambda gold, given: "\n" in given,
    "a comma for a decimal point": lambda gold, given: bool(
        re.search(r"^\d+,\d+$", gold) or re.search(r"^\d+,\d+$", given)
    ),
    "a chain of equations, or an approximation, with what is wrong in it": lambda gold, given: (
        given.count("=") > 1 or "approx" in given
    ),
    "an inequality turned round, or for a set": lambda gold, given: bool(
        re.search(r"[<>]|\\le|\\ge|\\in", gold + given)
    ),
    "an expression left to be worked out": lambda gold, given: (
        given.count("pmatrix") > 2 or bool(re.search(r"\d\+\d", given))
    ),
    "a rounding": lambda gold, given: "frac" in gold and bool(re.search(r"\d\.\d", given)),
    "a set for a list or a tuple, or without names": lambda gold, given: "," in gold + given,
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        _pip("download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", folder, VERIFY)
        _pip("install", "--no-deps", "--target", str(place / "ruler"), *RULER)
        sys.path.append(str(place / "ruler"))
        pairs = list(read_pairs(next(place.glob("math_verify*.tar.gz"))))
        ours = [equal(content(gold), content(given)) for gold, given, _ in pairs]
        theirs = [ruled(content(gold), content(given)) for gold, given, _ in pairs]
    causes = Counter(
        next((name for name, fits in CAUSES.items() if fits(gold, given)), f"none: {gold!r} and {given!r}")
        for (gold, given, right), mine in zip(pairs, ours, strict=True)
        if mine != right
    )
    print(
        table(
            ["where math-verify's tests say otherwise", "pairs"], [[name, str(n)] for name, n in causes.most_common()]
        )
    )
    labels = [right for _, _, right in pairs]
    apart = [(mine, right) for mine, other, right in zip(ours, theirs, labels, strict=True) if mine != other]
    figures = {
        "pairs": len(pairs),
        "agree_with_math_verify": sum(mine == right for mine, right in zip(ours, labels, strict=True)),
        "paid_though_wrong_there": sum(mine and not right for mine, right in zip(ours, labels, strict=True)),
        "unexplained": sum(n for name, n in causes.items() if name.startswith("none")),
        "agree_with_mathruler": len(pairs) - len(apart),
        "apart_and_the_tests_say_what_antiphon_says": sum(mine == right for mine, right in apart),
    }
    print("\n".join(f"{name} {value}" for name, value in figures.items()))
    figures |= {name: causes[name] for name in CAUSES}
    print(write_result("math_graders", figures, measures=MEASURES, settings=SETTINGS))


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True)


def read_pairs(sources: Path) -> Iterator[Pair]:
    """The literal cases of all tests whose parameters are a right answer, an answer and what is expected."""
    with tarfile.open(sources) as tar:
        for member in sorted(tar.getmembers(), key=lambda each: each.name):
            if "/tests/" in member.name and member.name.endswith(".py") and (file := tar.extractfile(member)):
                for node in ast.walk(ast.parse(file.read())):
                    yield from _cases(node)


def _cases(node: ast.AST) -> Iterator[Pair]:
    match node:
        case ast.Call(
            func=ast.Attribute(attr="parametrize"), args=[ast.Constant(value=str(names)), ast.List(elts=rows), *_]
        ) if names.replace(" ", "").startswith("gold,pred,expected"):
            for row in rows:
                try:
                    gold, given, right, *_ = ast.literal_eval(row)
                except ValueError:
                    continue
                if isinstance(gold, str) and isinstance(given, str):
                    yield gold, given, bool(right)


def content(text: str) -> str:
    """What is compared of a text."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    if formulas := FORMULA.findall(text):
        return str(next(filter(None, formulas[-1])))
    said = re.findall(r"answer is[: ]*(.+)", text, re.IGNORECASE)
    return str(said[-1] if said else text).strip().rstrip(".")


def equal(gold: str, given: str) -> bool:
    """What the `math` reward says."""
    try:
        return gold == given or not compare_answers(gold, given)
    except ValueError:  # the right answer cannot be read
        return False


def ruled(gold: str, given: str) -> bool:
    """What mathruler says; False where it raises an error or does not end."""
    from mathruler.grader import grade_answer

    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return bool(grade_answer(given, gold))
    except Exception:  # noqa: BLE001 - named boundary: another library
        return False
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main()
