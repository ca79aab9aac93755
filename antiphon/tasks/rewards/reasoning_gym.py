"""The graders of reasoning-gym, behind checks of the answer.

Some graders let Python evaluate the answer, some accept any answer, some raise on answers they cannot read.
"""

import ast
import functools
import importlib
import json
import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from antiphon.core.types import Message, Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import is_hard_to_read, last_match, zero_score
from antiphon.tasks.rewards.math.numeric import numeric


class _EmptyMatplotlib(MetaPathFinder, Loader):
    """Finds modules of matplotlib, and loads them without content.

    The library imports one that can plot, and needs no plots; matplotlib demands a folder that it can write to, and a confined
    grader has none.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a specification if it is such a module."""
        ours = name.partition(".")[0] in ("matplotlib", "mpl_toolkits")
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Have Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def _import_without_plots() -> ModuleType:
    """Import the library; of matplotlib, nothing is left that another import would find."""
    if "matplotlib" in sys.modules:
        return importlib.import_module("reasoning_gym")
    finder = _EmptyMatplotlib()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("reasoning_gym")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if getattr(module, "__loader__", None) is finder]:
            del sys.modules[name]


gym: Any = _import_without_plots()

MOST_CHARACTERS = 20_000  # of an answer, beyond those of the right one
LONGEST_EXPRESSION = 200  # characters, beside four times those of the right one
NONSENSE = "nonsense"  # accepted by graders that only check that there is an answer

_EVALUATING = frozenset(  # datasets whose graders call `eval` or sympy's `parse_expr` on the answer
    [
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "propositional_logic",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    ]
)
_NUMERIC = frozenset({"gsm_symbolic"})  # its grader reads the first number, without its sign
_FUNCTIONS = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "sec",
        "csc",
        "cot",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "exp",
        "log",
        "sqrt",
        "Abs",
    ]
)
# Numbers that are none, as Python reads them: `nanj` and `NaN1` too.
_SPECIAL = re.compile(r"\b(?:s?nan[0-9]*|inf|infinity|zoo|oo)[ij]?\b", re.IGNORECASE)
_ESCAPED = re.compile(r"\\u[0-9a-f]{4}", re.IGNORECASE)
_MANY_STEPS = re.compile(r"[+-]\d{3}")
_PUZZLES = {"countdown": "target", "puzzle24": ""}  # whose graders overlook numbers; where the metadata has the target
_NOT_PLAIN = re.compile(r"__|[\"'`\\:;@{}=#\[\]!]|<<|>>|\.\s*[^\W\d]|[^\W\d]\s*\.|\)\s*[.(]")
_KEYWORD = re.compile(r"\b(?:and|or|not|if|else|in|is|lambda|for)\b")  # of Python: "5 or 7" evaluates to 5
_CALL = re.compile(r"([^\W\d]\w*)\s*\(")
_EXPONENT = re.compile(
    r"(\)?)\s*(?:\*\*|\^)\s*(?:(-?\d{1,4}(?![\d.])|\(\s*-?\d{1,4}(?:\s*/\s*\d{1,4})?\s*\)|[^\W\d]\w*)(?!\s*(?:\*\*|\^))|)"
)
_LARGEST_POWER = 10_000  # the largest exponent, times those of brackets


def reasoning_gym(
    prompt: Prompt, transcript: Transcript, *, pattern: str | None = None, partial_credit: bool = True
) -> Score:
    """Score a response by its dataset's grader.

    The answer is the whole response, or the last match of the regular expression `pattern`. Many datasets give partial credit
    to a wrong answer that contains the right one; without `partial_credit` it earns 0. The payload is a row of the source
    `reasoning_gym`. An answer on which the grader raises, which it would evaluate as code or for long, or which earns no more
    than nonsense, earns 0 whatever the grader says.
    """
    given = last_match(pattern, transcript.response)
    if given is None:
        return zero_score("nothing in the response matches the pattern")
    score = score_answer(given, prompt.payload, _dataset(json.dumps(prompt.payload["dataset"], sort_keys=True)))
    value = score.value
    return score if partial_credit or value is None or value >= 1.0 else replace(score, value=0.0)


def score_answer(given: str, row: Mapping[str, Any], grader: Any) -> Score:
    """Score an answer to the problem `row` by the dataset `grader`, behind the checks that its text and its score need.

    `row` is an entry of the dataset, with the settings that the dataset was made by as `dataset`.
    """
    right = str(row["answer"])
    name = row.get("metadata", {}).get("source_dataset", row["dataset"]["name"])
    if problem := _unreadable(given, right, name):
        return zero_score(problem)
    if name in _NUMERIC:
        plain = Prompt(id=name, task=name, messages=(), payload={"answer": right})
        return numeric(plain, Transcript((Message("assistant", given),)), require_marker=False)
    try:
        value = float(grader.score_answer(given, row))
    except Exception as error:  # noqa: BLE001 - named boundary: the library's code, on a model's text
        if row["answer"] is not None:
            grader.score_answer(row["answer"], row)  # raises if the row is to blame
        return zero_score(f"the dataset's grader cannot read the answer: {type(error).__name__}")
    if value >= 1.0 and given.strip() != right and (problem := _overlooked(given, row, name)):
        return zero_score(problem)
    if value >= 1.0 and given.strip() != right and value <= grader.score_answer(NONSENSE, row):
        return zero_score("the dataset's grader accepts any answer, and this is not the right one")
    return Score.of(value, partial=value)


def _unreadable(given: str, right: str, name: str) -> str:
    """Return why an answer must not be given to the dataset's grader; an empty string if it may."""
    if len(given) > MOST_CHARACTERS + len(right):
        return f"the answer has {len(given)} characters"
    if is_hard_to_read(given) and not is_hard_to_read(right):
        return "the answer takes long to read"
    read = given.replace(" ", "") if name == "complex_arithmetic" else given  # as its grader does
    if _SPECIAL.search(read) and not _SPECIAL.search(right):
        return "the answer is no number"
    if _ESCAPED.search(given) and not _ESCAPED.search(right):
        return "the answer has escaped signs"
    if name == "rush_hour" and _MANY_STEPS.search(given):
        return "the answer takes long to follow"
    if name in _EVALUATING and given.strip() != right and not _is_safe_to_evaluate(given, right):
        return "the answer is neither data nor arithmetic"
    return ""


def _overlooked(given: str, row: Mapping[str, Any], name: str) -> str:
    """Return why an answer that the dataset's grader accepts does not solve the task; an empty string if it may."""
    metadata = row["metadata"]
    if name == "propositional_logic" and _bare(given) in map(_bare, metadata["premises"]):
        return "the answer is one of the premises"
    if name in _PUZZLES:
        target = metadata.get(_PUZZLES[name], 24)
        try:
            numbers, result = _solve(ast.parse(given.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ArithmeticError, RecursionError):
            return "the answer is no arithmetic with + - * /"
        if sorted(numbers) != sorted(metadata["numbers"]) or result != target:
            return "the answer does not make the target of the numbers"
    return ""


def _bare(formula: str) -> str:
    return re.sub(r"[\s()]", "", formula)


def _solve(node: ast.expr) -> tuple[list[int], Fraction]:
    """Return the numbers of an expression and its exact value; `ValueError` if it is more than + - * / of whole numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return [node.value], Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        numbers, value = _solve(node.operand)
        return numbers, -value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        (numbers, left), (others, right) = _solve(node.left), _solve(node.right)
        return numbers + others, _OPERATIONS[type(node.op)](left, right)
    raise ValueError("no arithmetic")


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _is_safe_to_evaluate(text: str, right: str) -> bool:
    """Return True if evaluating a text is safe and fast.

    It is data, or operations on numbers and names with the usual functions and those of the right answer.
    """
    try:
        ast.literal_eval(text.strip())
        return True
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    if not {*_KEYWORD.findall(text)} <= {*_KEYWORD.findall(right)} or len(text) > LONGEST_EXPRESSION + 4 * len(right):
        return False
    if _NOT_PLAIN.search(text) or not _FUNCTIONS.union(_CALL.findall(right)).issuperset(_CALL.findall(text)):
        return False
    exponents = _EXPONENT.findall(text)
    brackets, largest = 1, 1
    for bracket, exponent in exponents:
        number = max(1, int((re.findall(r"\d+", exponent.partition("/")[0]) or [1])[0]))
        brackets, largest = (brackets * number, largest) if bracket else (brackets, max(largest, number))
    return all(exponent for _, exponent in exponents) and brackets * largest <= _LARGEST_POWER


@functools.cache
def _dataset(settings: str) -> Any:
    return gym.create_dataset(**json.loads(settings))
