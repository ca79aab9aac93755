"""YAML 1.2 texts as plain values, within limits.

It is version 1.2's in two places where PyYAML's 1.1 surprises: `1e-6` is a number, `on` a string.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from antiphon.core.errors import ConfigError

MOST_CHARACTERS = 1 << 20  # of one YAML text
MOST_VALUES = 50_000  # in it, with aliases written out

Keys = tuple[str | int, ...]  # path to a value: keys of mappings, indices of lists

_FLOAT = re.compile(
    r"""[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.[0-9]+(?:[eE][-+]?[0-9]+)?)$
    |[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """The safe loader with scalars of YAML 1.2, and duplicate or non-string keys refused."""

    yaml_implicit_resolvers = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != f"{_TAG}str":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is not a string; quote it", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    f"{_TAG}int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """The safe dumper; it also quotes strings that only YAML 1.2 reads as numbers."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


def parse_yaml(text: str, source: str) -> tuple[Any, yaml.Node | None]:
    """Return the value and the syntax tree of a YAML text; `ConfigError` names `source` and the line."""
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read", path=source)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None and _count_values(node, {}) > MOST_VALUES:
            raise ConfigError(f"has more than {MOST_VALUES:,} values, its aliases written out", path=source)
        return (loader.construct_document(node) if node else None), node
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(str(error.problem or error.context), path=f"{source}{line}") from error
    except (yaml.YAMLError, ValueError) as error:  # the latter of a scalar, such as a number of 5,000 digits
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}", path=source) from error
    except RecursionError as error:
        raise ConfigError("cannot be a tree of plain values: nested too deeply, or in itself", path=source) from error


def _count_values(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Return how many values a node holds when each alias is written out. `RecursionError` for one that holds itself."""
    if node not in known:
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [value for _, value in node.value]
        known[node] = 1 + sum(_count_values(each, known) for each in inner)
    return known[node]


def dump_yaml(data: Any) -> str:
    """Return YAML text that `parse_yaml` reads back equal."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def iterate_lines(node: yaml.Node | None, keys: Keys, above: tuple[yaml.Node, ...]) -> Iterator[tuple[Keys, int]]:
    """Yield each path below `node` with its line, counted from 1."""
    if node is None or node in above:  # an anchor that holds itself; json refuses the value later
        return
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*keys, key.value), key.start_mark.line + 1
            yield from iterate_lines(value, (*keys, key.value), (*above, node))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*keys, index), value.start_mark.line + 1
            yield from iterate_lines(value, (*keys, index), (*above, node))


def annotate_yaml(text: str, describe: Callable[[Keys], str]) -> str:
    """Return a text that `dump_yaml` made with a comment for each value, which leaves its values as they are.

    Args:
        text: The YAML text.
        describe: Returns the comment of the value at a path.
    """
    lines = text.splitlines()
    _, node = parse_yaml(text, "the text")
    found = list(_iterate_values(node, (), 0))
    width = max((len(lines[first]) for _, first, last in found if first == last), default=0)
    for keys, first, last in reversed(found):
        comment = f"# {describe(keys)}"
        if first == last:
            lines[first] = f"{lines[first]:<{min(width, 60)}}  {comment}"
        else:  # a text of several lines has no room behind it
            indent = len(lines[first]) - len(lines[first].lstrip())
            lines.insert(first, " " * indent + comment)
    return "\n".join([*lines, ""])


def _iterate_values(node: yaml.Node | None, keys: Keys, line: int) -> Iterator[tuple[Keys, int, int]]:
    """Yield the path of each value that is no section, with the lines of its beginning and its end, counted from 0.

    Args:
        node: The syntax tree.
        keys: Path to it.
        line: Line of its key.
    """
    if isinstance(node, yaml.MappingNode) and node.value:
        for key, value in node.value:
            yield from _iterate_values(value, (*keys, key.value), key.start_mark.line)
    elif isinstance(node, yaml.SequenceNode) and node.value:
        for index, value in enumerate(node.value):
            yield from _iterate_values(value, (*keys, index), value.start_mark.line)
    elif node is not None:
        yield keys, line, node.end_mark.line
