"""Small mistakes put into Python on purpose, one at a time: for environments in which they are mended, and for tests that
should notice them.

A fault is one change: an operator, a constant, a condition, two arguments, a statement left out. All else stays as it is to
the last space, so that nothing but the meaning gives it away; docstrings, names, types and decorators too. One that means the
same as the original is among them now and then.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

OPERATORS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {  # how each is written, and what stands for it then
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
SIMPLE = ast.Name | ast.Call | ast.Attribute | ast.Subscript  # what can be negated without parentheses
Blocks = tuple[type[ast.AST], ...]
PLAIN_BLOCKS: Blocks = (ast.FunctionDef, ast.If, ast.For)  # whose statements can be left out
FLOW_BLOCKS: Blocks = (ast.With, ast.While, ast.Try, ast.TryStar, ast.ExceptHandler)
ASYNC_BLOCKS: Blocks = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith)

Change = tuple[int, int, str]  # the bytes that are replaced, from and to, and by what


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of a file."""

    line: int
    """Where it begins, from 1."""
    source: str
    """Of the whole file, changed."""
    change: Change
    """What makes it of the original."""


def faults(source: str) -> list[Fault]:
    """All faults of a file, each once, in the order of its syntax tree. `SyntaxError` if the file has one."""
    file = _File(source, PLAIN_BLOCKS)
    return list(file.faults(list(file.changes())))


def changes_everywhere(source: str) -> list[Change]:
    """Return the changes of a file, most of which are faults; see `fault_of`.

    Statements of `with`, `while` and `try`, and of asynchronous functions, are left out as well.
    """
    return list(dict.fromkeys(_File(source, PLAIN_BLOCKS + FLOW_BLOCKS + ASYNC_BLOCKS).changes()))


def fault_of(source: str, change: Change) -> Fault | None:
    """Return the fault that a change is; None if it leaves no Python, or the same file."""
    return next(_File(source, ()).faults([change]), None)


def drawn_faults(source: str, random: np.random.Generator) -> Iterator[Fault]:
    """The same in a random order, each made when it is asked for: most of the work is to see that it still parses."""
    file = _File(source, PLAIN_BLOCKS)
    changes = list(file.changes())
    return file.faults([changes[index] for index in random.permutation(len(changes))])


class _File:
    """A file and where its nodes stand in it."""

    def __init__(self, source: str, blocks: Blocks) -> None:
        self._blocks = blocks
        self.data = source.encode()
        self._tree = ast.parse(source)
        self._lines = [0]  # where each begins
        for line in self.data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def faults(self, changes: Iterable[Change]) -> Iterator[Fault]:
        """What changes make of the file, where that is Python, and another file."""
        seen = {self.data}
        for start, end, text in changes:
            changed = self.data[:start] + text.encode() + self.data[end:]
            if changed not in seen and _parses(changed.decode()):
                seen.add(changed)
                yield Fault(self.data.count(b"\n", 0, start) + 1, changed.decode(), (start, end, text))

    def changes(self) -> Iterator[Change]:
        """The changes of all nodes."""
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
        """Other operators between two operands."""
        written, others = OPERATORS.get(type(op), ("", ()))
        start, end = self._span(left)[1], self._span(right)[0]
        found = re.compile(rb"[\s\\)]*(" + re.escape(written).replace(r"\ ", r"\s+").encode() + rb")").match(
            self.data, start, end
        )
        if found:  # else a comment is between them
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
                if self.data[mid:again].strip() == b",":  # neither is in parentheses
                    yield start, end, self._text(second) + self.data[mid:again].decode() + self._text(first)

    def _statements(self, node: ast.AST) -> Iterator[Change]:
        """Statements of a function that can be left out: those without which every name is still there."""
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
                said = isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant)
                changed = isinstance(statement, ast.Assign | ast.AugAssign) and names <= known
                ended = isinstance(statement, ast.Return) and isinstance(inner, ast.If)
                if said or changed or ended or isinstance(statement, ast.Raise):
                    yield *self._span(statement), "pass"
                known |= names


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is in it, but for types, decorators and texts."""
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
