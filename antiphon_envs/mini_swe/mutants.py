"""Mutants of Python source: for environments in which they are repaired, and for measuring tests.

A mutant has one change: an operator, a constant, a condition, two swapped arguments, or a removed statement. All other text
stays the same, so that only the meaning reveals the change; docstrings, names, types and decorators are never changed. Some
mutants are equivalent to the original.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

OPERATORS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {  # how each is written, and its replacements
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("/",)),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*",)),
    ast.Mod: ("%", ("//",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
    ast.And: ("and", ("or",)),
    ast.Or: ("or", ("and",)),
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "sum": "mean", "mean": "sum"}
SIMPLE = ast.Name | ast.Call | ast.Attribute | ast.Subscript  # negated without parentheses
Blocks = tuple[type[ast.AST], ...]
PLAIN_BLOCKS: Blocks = (ast.FunctionDef, ast.If, ast.For)  # blocks whose statements can be removed
FLOW_BLOCKS: Blocks = (ast.With, ast.While, ast.Try, ast.TryStar, ast.ExceptHandler)
ASYNC_BLOCKS: Blocks = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith)

Change = tuple[int, int, str]  # start and end of the replaced bytes, and their replacement


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file with one change."""

    line: int
    """Line of the change, from 1."""
    source: str
    """Text of the whole changed file."""
    change: Change
    """The change of the original."""


def all_mutants(source: str) -> list[Mutant]:
    """Return all mutants of a file, each once, in the order of its syntax tree.

    Raises:
        SyntaxError: The file cannot be parsed.
    """
    file = _File(source, PLAIN_BLOCKS)
    return list(file.mutants(list(file.changes())))


def list_changes(source: str) -> list[Change]:
    """Return the changes of a file, most of which give a mutant; see `make_mutant`.

    Statements of `with`, `while` and `try`, and of asynchronous functions, are removed as well.
    """
    return list(dict.fromkeys(_File(source, PLAIN_BLOCKS + FLOW_BLOCKS + ASYNC_BLOCKS).changes()))


def make_mutant(source: str, change: Change) -> Mutant | None:
    """Apply a change to a file. Return None if the result cannot be parsed or equals the file."""
    return next(_File(source, ()).mutants([change]), None)


def draw_mutants(source: str, random: np.random.Generator) -> Iterator[Mutant]:
    """Yield all mutants of a file in a random order, lazily: most of the time goes into parsing them."""
    file = _File(source, PLAIN_BLOCKS)
    changes = list(file.changes())
    return file.mutants([changes[index] for index in random.permutation(len(changes))])


class _File:
    """A file, and the positions of its nodes."""

    def __init__(self, source: str, blocks: Blocks) -> None:
        self._blocks = blocks
        self.data = source.encode()
        self._tree = ast.parse(source)
        self._lines = [0]  # offsets of their beginnings
        for line in self.data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def mutants(self, changes: Iterable[Change]) -> Iterator[Mutant]:
        """Apply each change; skip results that do not parse or were there before."""
        seen = {self.data}
        for start, end, text in changes:
            changed = self.data[:start] + text.encode() + self.data[end:]
            if changed not in seen and _parses(changed.decode()):
                seen.add(changed)
                yield Mutant(self.data.count(b"\n", 0, start) + 1, changed.decode(), (start, end, text))

    def changes(self) -> Iterator[Change]:
        """Yield the changes of all nodes."""
        for node in _walk(self._tree):
            yield from self._operators(node)
            yield from self._constants(node)
            yield from self._conditions(node)
            yield from self._calls(node)
            yield from self._statements(node)

    def _span(self, node: Any) -> tuple[int, int]:
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.data[start:end].decode()

    def _operators(self, node: ast.AST) -> Iterator[Change]:
        match node:
            case ast.BinOp(left=left, op=op, right=right):
                yield from self._operator(left, op, right)
            case ast.AugAssign(target=left, op=op, value=right):
                yield from self._operator(left, op, right)
            case ast.BoolOp(op=op, values=values):
                for left, right in pairwise(values):
                    yield from self._operator(left, op, right)
            case ast.Compare(left=first, ops=ops, comparators=others):
                for left, comparison, right in zip([first, *others], ops, others, strict=False):
                    yield from self._operator(left, comparison, right)
            case ast.UnaryOp():
                start, _ = self._span(node)
                for written in re.compile(rb"(not\b|[-+~])\s*").finditer(self.data, start, start + 4):
                    yield *written.span(), ""

    def _operator(self, left: ast.AST, op: ast.AST, right: ast.AST) -> Iterator[Change]:
        """Yield other operators between two operands."""
        written, others = OPERATORS.get(type(op), ("", ()))
        start, end = self._span(left)[1], self._span(right)[0]
        found = re.compile(rb"[\s\\)]*(" + re.escape(written).replace(r"\ ", r"\s+").encode() + rb")").match(
            self.data, start, end
        )
        if found:  # not if a comment is between them
            for other in others:
                yield *found.span(1), other

    def _constants(self, node: ast.AST) -> Iterator[Change]:
        if not isinstance(node, ast.Constant):
            return
        if isinstance(node.value, bool):
            yield *self._span(node), repr(not node.value)
        elif isinstance(node.value, int | float):
            yield *self._span(node), repr(node.value + 1)
            if node.value:
                yield *self._span(node), repr(type(node.value)())

    def _conditions(self, node: ast.AST) -> Iterator[Change]:
        tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else getattr(node, "ifs", [])
        for test in tests:
            if isinstance(test, SIMPLE):
                start, _ = self._span(test)
                yield start, start, "not "

    def _calls(self, node: ast.AST) -> Iterator[Change]:
        if not isinstance(node, ast.Call):
            return
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in NAMES:
            _, end = self._span(node.func)
            yield end - len(name), end, NAMES[name]
        match node.args:
            case [first, second, *_] if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                (start, mid), (again, end) = self._span(first), self._span(second)
                if self.data[mid:again].strip() == b",":  # not if one is in parentheses
                    yield start, end, self._text(second) + self.data[mid:again].decode() + self._text(first)

    def _statements(self, node: ast.AST) -> Iterator[Change]:
        """Yield removals of a function's statements that leave every name defined."""
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not isinstance(node, self._blocks):
            return
        known = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        for inner in ast.walk(node):
            for statement in getattr(inner, "body", []) if isinstance(inner, self._blocks) else []:
                names = {
                    each.id
                    for each in ast.walk(statement)
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                }
                called = isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant)
                changed = isinstance(statement, ast.Assign | ast.AugAssign) and names <= known
                ended = isinstance(statement, ast.Return) and isinstance(inner, ast.If)
                if called or changed or ended or isinstance(statement, ast.Raise):
                    yield *self._span(statement), "pass"
                known |= names


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and its descendants, without types, decorators and f-strings."""
    yield node
    if isinstance(node, ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
