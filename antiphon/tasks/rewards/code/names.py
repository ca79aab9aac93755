"""Find the names that tests use of a solution, from the text of the tests alone."""

import ast
import builtins
import symtable
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache

STANDARD = sys.stdlib_module_names - {"antigravity", "this"}
REMEMBERED = 512  # texts of tests: siblings are judged by the same
USUAL = {"np": "numpy", "pd": "pandas"}  # names that modules are used by


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """The names that a text of tests uses."""

    names: frozenset[str]
    """Names that are the solution's to define."""
    modules: dict[str, str]
    """Name -> module: where the tests use a module that they do not import."""
    attributes: frozenset[str]
    """All that is named after a dot or as a string: what objects of the solution can be asked for."""
    caught: frozenset[str]
    """Names of exceptions that the tests expect."""


@lru_cache(REMEMBERED)
def find_uses(setup: str, cases: tuple[str, ...], packages: tuple[str, ...] = ()) -> Uses:
    """Return what statements use that are run one by one after `setup`, in one namespace.

    Args:
        setup: Statements that define names for all cases.
        cases: Statements, each a case.
        packages: Names of modules, beside those of the standard library, that the tests can import.

    Raises:
        ValueError: The text is no Python.
    """
    trees = [_parse(text) for text in (setup, *cases)]
    defined, used = _bindings(setup)
    for case in cases:
        own, needed = _bindings(case)
        used |= needed - own
    free = used - defined
    if not {name for name in free if not hasattr(builtins, name)}:
        called = {name for tree in trees[1:] for name in _called(tree)}
        free -= called if len(called) != 1 else set()  # tests of nothing but a builtin name test what has that name
    else:
        free = {name for name in free if not hasattr(builtins, name)}
    modules = {name: USUAL.get(name, name) for name in free if _is_module(name, trees, packages)}
    attributes, caught = _attributes_and_caught(trees)
    return Uses(names=frozenset(free - modules.keys()), modules=modules, attributes=attributes, caught=caught)


@lru_cache(REMEMBERED)
def find_imports(tests: str, module: str) -> Uses:
    """Return what a file of tests uses of `module`, which it imports. `ValueError` if it is no Python."""
    tree = _parse(tests)
    names, aliases = set[str](), {module}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == module:
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == module}
    names |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases
    }
    if "*" in names:
        defined, used = _bindings(tests)
        names |= {name for name in used - defined if not hasattr(builtins, name)}
    attributes, caught = _attributes_and_caught([tree])
    return Uses(names=frozenset(names - {"*"}), modules={}, attributes=attributes, caught=caught)


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are no Python: {error}") from None


def _bindings(text: str) -> tuple[set[str], set[str]]:
    """The names that a text defines, and the global names that it uses."""
    top = symtable.symtable(text, "tests", "exec")
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    for table in _nested(top):
        used |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
        defined |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_declared_global()}
    return defined, used


def _nested(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _nested(child)


def _called(tree: ast.Module) -> set[str]:
    """Names of functions that are called."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _is_module(name: str, trees: list[ast.Module], packages: Collection[str]) -> bool:
    """Return True if a name stands for a module: it can be imported, and only its attributes are used."""
    if name not in STANDARD and USUAL.get(name, name) not in packages:
        return False
    nodes = [node for tree in trees for node in ast.walk(tree)]
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return all(id(node) in owners for node in nodes if isinstance(node, ast.Name) and node.id == name)


def _attributes_and_caught(trees: list[ast.Module]) -> tuple[frozenset[str], frozenset[str]]:
    attributes, caught = set[str](), set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute):
            attributes.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            attributes.add(node.value)
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            caught |= _names(node.type)
        elif isinstance(node, ast.Call) and node.args and _last_name(node.func) in EXPECTING:
            caught |= _names(node.args[0])
    return frozenset(attributes), frozenset(caught)


EXPECTING = {"raises", "assertRaises", "assertRaisesRegex", "suppress"}


def _last_name(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _names(expression: ast.expr) -> set[str]:
    """Names of the classes in an expression, which may be a tuple."""
    return {_last_name(part) for part in ast.walk(expression) if isinstance(part, ast.Name | ast.Attribute)}
