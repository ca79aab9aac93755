"""Formats of tool calls by name: `hermes`, also used by Qwen2.5 and Qwen3, and `qwen3_coder`.

Any response can be parsed; text that looks like a call and is none becomes a problem and is never guessed at. A `<think>` block
at the beginning is not parsed, whether the response or the chat template opened it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from antiphon.core.registry import Registry
from antiphon.core.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"

Schema = Mapping[str, Any]  # JSON schema of an object

# Without its first tag if the chat template has written that. Then it holds no call: `</think>` may stand in an argument.
_THOUGHT = re.compile(rf"\s*+(?:<think>.*?(?:</think>|\Z)|(?:(?!<think>|{OPEN}).)*?</think>)", re.DOTALL)


class ParsedResponse(NamedTuple):
    """A parsed response."""

    content: str
    """The text outside calls, stripped."""
    calls: tuple[ToolCall, ...]
    problems: tuple[str, ...]
    """Calls that cannot be parsed; each a sentence for the policy."""


class ToolFormat(Protocol):
    """A format of calls, made with the parameter schemas of tools by name."""

    def __init__(self, schemas: Mapping[str, Schema]) -> None: ...

    def explain(self) -> str:
        """Explain the format to the policy."""

    def parse(self, text: str) -> ParsedResponse:
        """Parse a response; never raises."""

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        """Return a text that parses to this, without ids of calls; `ValueError` if there is none."""


TOOL_FORMATS = Registry(
    "format of tool calls",
    {
        "hermes": "antiphon.tasks.tool_calls:Hermes",
        "qwen3_coder": "antiphon.tasks.tool_calls:Qwen3Coder",
    },
)


def strip_thinking(text: str) -> str:
    """Remove a `<think>` block at the beginning of a text; its first tag may be absent.

    >>> strip_thinking("<think>Or 5?</think> 4")
    '4'
    """
    return _THOUGHT.sub("", text, count=1).strip() if _THOUGHT.match(text) else text


class _Tagged:
    """Base of formats with calls between `<tool_call>` and `</tool_call>`."""

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        self._schemas = schemas

    def parse(self, text: str) -> ParsedResponse:
        """Parse a response; never raises."""
        thought = _THOUGHT.match(text)
        rest = text[thought.end() :] if thought else text
        outside, calls, problems = [], [], []
        while rest:
            before, opened, rest = rest.partition(OPEN)
            outside.append(before)
            if self._has_fragment(before):
                problems.append(f"A call has to begin with {OPEN}.")
            if opened:
                try:
                    call, rest = self._parse_call(rest)
                    calls.append(call)
                except (ValueError, RecursionError) as error:
                    problems.append(f"A call cannot be read: {error}.")
                    rest = rest.partition(CLOSE)[2]
        content = (thought[0] if thought else "") + "".join(outside)
        return ParsedResponse(content.strip(), tuple(calls), tuple(problems))

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        """Return a text that parses to this; `ValueError` if there is none."""
        blocks = [f"{OPEN}\n{self._render_call(call)}\n{CLOSE}" for call in calls]
        text = "\n".join(([content] if content else []) + blocks)
        if self.parse(text) != ParsedResponse(content, tuple(replace(call, id="") for call in calls), ()):
            raise ValueError(f"this cannot be written as {type(self).__name__}: {content!r:.80}, {calls!r:.200}")
        return text

    def _has_fragment(self, outside: str) -> bool:
        """Return True if text outside calls holds an unclosed or unopened call."""
        return CLOSE in outside

    def _parse_call(self, text: str) -> tuple[ToolCall, str]:
        """Return the call that `text` begins with and the rest of the text; `ValueError` if there is none."""
        raise NotImplementedError

    def _render_call(self, call: ToolCall) -> str:
        raise NotImplementedError


class Hermes(_Tagged):
    """Calls as JSON objects with the keys `name` and `arguments`."""

    def explain(self) -> str:
        """Explain the format to the policy."""
        example = '{"name": <its name>, "arguments": <an object with its arguments>}'
        return f"To call a function, write its name and arguments as JSON between tags:\n{OPEN}\n{example}\n{CLOSE}"

    def _parse_call(self, text: str) -> tuple[ToolCall, str]:
        text = text.lstrip()
        value, end = _JSON.raw_decode(text)
        rest = text[end:].lstrip()
        if not rest.startswith(CLOSE):
            raise ValueError(f"{CLOSE} does not follow its JSON")
        match value:
            case {"name": str(name), "arguments": dict(arguments)}:
                _check_text(value)
                return ToolCall(name, arguments), rest.removeprefix(CLOSE)
        raise ValueError('it is no object with "name", a string, and "arguments", an object')

    def _render_call(self, call: ToolCall) -> str:
        return _json({"name": call.name, "arguments": call.arguments})


class Qwen3Coder(_Tagged):
    """Calls as tags for the function and each parameter.

    A value is plain text if the tool's schema says it is a string; else JSON, or plain text if it is no JSON.
    """

    _TAGS = ("</parameter>", "</function>", OPEN, CLOSE)
    _FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*" + CLOSE, re.DOTALL)
    _PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)

    def explain(self) -> str:
        """Explain the format to the policy."""
        return (
            "To call a function, write its name, and a block for each of its parameters, between tags:\n"
            f"{OPEN}\n<function=name>\n<parameter=first>\nvalue\n</parameter>\n<parameter=second>\nlines of\na value\n"
            f"</parameter>\n</function>\n{CLOSE}"
        )

    def _has_fragment(self, outside: str) -> bool:
        return CLOSE in outside or "<function=" in outside

    def _parse_call(self, text: str) -> tuple[ToolCall, str]:
        found = self._FUNCTION.match(text)
        if not found:
            raise ValueError(f"it has not the form <function=name>...</function>{CLOSE}")
        name, body = found[1], found[2].strip()
        arguments, end = {}, 0
        while parameter := self._PARAMETER.match(body, end):
            if parameter[1] in arguments:
                raise ValueError(f"the parameter {parameter[1]} occurs twice")
            arguments[parameter[1]] = self._value(name, parameter[1], parameter[2])
            end = parameter.end()
        if end < len(body):
            raise ValueError(f"there is no <parameter=name>...</parameter> in {body[end : end + 40]!r}")
        return ToolCall(name, arguments), text[found.end() :]

    def _is_string(self, name: str, parameter: str) -> bool:
        properties = self._schemas.get(name, {}).get("properties", {})
        return bool(properties.get(parameter, {}).get("type") == "string")

    def _value(self, name: str, parameter: str, text: str) -> Any:
        if self._is_string(name, parameter):
            return text
        try:
            value = _JSON.decode(text)
            _check_text(value)
        except (ValueError, RecursionError):
            return text
        return value

    def _render_call(self, call: ToolCall) -> str:
        lines = [f"<function={call.name}>"]
        for key, value in call.arguments.items():
            lines += [f"<parameter={key}>", self._text(call.name, key, value), "</parameter>"]
        return "\n".join([*lines, "</function>"])

    def _text(self, name: str, key: str, value: Any) -> str:
        if isinstance(value, str):
            plain = not any(tag in value for tag in self._TAGS)
            if self._is_string(name, key) or (plain and self._value(name, key, value) == value):
                return value
        return _json(value).replace("<", "\\u003c")  # "<" occurs only in strings of JSON


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if abs(value) < float("inf") else _reject_constant(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, in which no key may occur twice: readers differ about which one counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in an object")
    return found


_JSON = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_finite, object_pairs_hook=_unique)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _check_text(value: Any) -> None:
    """Raise `ValueError` for half a surrogate pair, which could not be written again."""
    json.dumps(value, ensure_ascii=False).encode()
