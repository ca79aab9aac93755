"""Tools that a policy may call: Python functions or remote ones, with arguments checked against a JSON schema."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from antiphon.core.errors import ConfigError
from antiphon.core.types import ToolCall
from antiphon.tasks.tool_calls import Schema, ToolFormat


class ToolError(Exception):
    """A tool rejects a call. The policy reads the message; any other error that a tool raises fails the attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a policy may call; a plain one must be quick, because it runs in the event loop."""

    name: str
    description: str
    parameters: Schema
    call: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Tool":
        """Make a tool of a Python function; its docstring and annotations become description and schema.

        Raises:
            ConfigError: A parameter has no annotation, or one that JSON has no type for.
        """
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters
        if unknown := [name for name in parameters if name not in hints]:
            message = f"tool {function.__name__}: its parameter {unknown[0]} has no annotation"
            raise ConfigError(message, value=unknown[0])
        schema = {
            "type": "object",
            "properties": {name: _json_schema(hints[name], f"{function.__name__}({name})") for name in parameters},
            "required": [name for name, each in parameters.items() if each.default is each.empty],
            "additionalProperties": False,
        }
        described = inspect.getdoc(function) or ""
        return cls(name=function.__name__, description=described, parameters=schema, call=function)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Check arguments against the top level of the schema; `ToolError` if they do not match."""
        properties: Mapping[str, Any] = self.parameters.get("properties", {})
        if missing := [name for name in self.parameters.get("required", ()) if name not in arguments]:
            raise ToolError(f"{self.name} needs the argument {missing[0]}")
        for name, value in arguments.items():
            if name not in properties:
                if self.parameters.get("additionalProperties") is False:
                    raise ToolError(f"{self.name} has no argument {name}, only {', '.join(properties) or 'none'}")
            elif expected := _expected_type(properties[name], value):
                raise ToolError(f"{self.name}: {name} is {json.dumps(value)[:80]}, expected {expected}")


class Toolbox:
    """The tools of one environment and the format of their calls."""

    def __init__(self, tools: Sequence[Tool], make_format: Callable[[Mapping[str, Schema]], ToolFormat]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            names = [tool.name for tool in tools]
            raise ConfigError(f"two tools have the same name: {', '.join(names)}", key="tools", value=names)
        self.format = make_format({name: tool.parameters for name, tool in self.tools.items()})

    def describe(self) -> str:
        """Describe the tools and the format of calls to the policy."""
        lines = [
            render_result({"name": tool.name, "description": tool.description, "parameters": tool.parameters})
            for tool in self.tools.values()
        ]
        return "\n".join(("You can call functions:", "<tools>", *lines, "</tools>", self.format.explain()))

    def call(self, call: ToolCall) -> Any:
        """Call a tool and return its result, an awaitable if the tool is `async`.

        Raises:
            ToolError: The tool does not exist or does not take these arguments.
        """
        tool = self.tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no function {call.name}, only {', '.join(self.tools)}")
        tool.check(call.arguments)
        return tool.call(**call.arguments)

    async def answer(self, call: ToolCall, most: int) -> tuple[str, bool]:
        """Call a tool; return its result as the policy reads it, `most` characters of it, and True if the call succeeded."""
        try:
            result = self.call(call)
            text, success = render_result(await result if inspect.isawaitable(result) else result), True
        except ToolError as error:
            text, success = f"error: {error}", False
        more = len(text) - most
        return (f"{text[:most]}\n[{more} characters more]" if more > 0 else text), success


def render_result(result: Any) -> str:
    """Return a tool's result as the policy reads it: text as it is, everything else as JSON."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def render_tool_responses(texts: Sequence[str]) -> str:
    """Wrap the results of calls, in the order of the calls, in the tags that Hermes and Qwen expect."""
    return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def _json_schema(hint: Any, where: str) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"type": _TYPES[type(inner[0])], "enum": list(inner)}
    if origin in (Union, UnionType):
        hint = next(each for each in inner if each is not type(None))
        return _json_schema(hint, where)
    if (origin or hint) not in _TYPES:
        valid = [*(each.__name__ for each in _TYPES), "Literal"]
        raise ConfigError(f"tool {where}: {hint!r} is none of {', '.join(valid)}", value=hint, valid=valid)
    schema: dict[str, Any] = {"type": _TYPES[origin or hint]}
    if origin is list:
        schema["items"] = _json_schema(inner[0], where)
    return schema


def _expected_type(schema: Any, value: Any) -> str:
    """Return what the schema expects instead of `value`; an empty string if it matches, or the schema is more complex."""
    if not isinstance(schema, Mapping):
        return ""
    if "enum" in schema and value not in schema["enum"]:
        return f"one of {', '.join(map(str, schema['enum']))}"
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_CHECKS.get(name, lambda _: True)(value) for name in types):
        return f"{' or '.join(types)}"
    return ""
