"""Chat requests and replies independent of the protocol, and functions that read fields of request bodies."""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from antiphon.core.types import IMAGE_MARKER, Completion, Message

T = TypeVar("T")

# Error codes that end a conversation.
CONTEXT_LENGTH = "context_length_exceeded"
MAX_TURNS = "max_turns"


class ApiError(Exception):
    """A request that cannot be answered: HTTP `status`, and the `code` by which clients tell the reason."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for one or more replies to a conversation."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = "auto"
    """`auto`, `none`, `required`, or `=name` of the tool that is to be called."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    requested_sampling: Mapping[str, float] = field(default_factory=dict)
    """Fields of `Sampling` that the client sets."""
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False


TextPrompt = str | tuple[int, ...]  # or its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ChatRequest):
    """A request for completions of texts, `n` of each. It has no messages."""

    prompts: tuple[TextPrompt, ...]
    echo: bool = False
    """Completions begin with their prompts."""
    texts: tuple[str, ...] = ()
    """Text of each prompt, once they were tokenized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One reply to a chat request, or one completion of a text."""

    message: Message
    reason: str
    """`stop`, `length`, `tool_calls`, or `stop_string`."""
    stop: str | None
    """The stop string that ended the reply; it is not part of the message."""
    completion: Completion
    readable: bool = True


# --- reading JSON ------------------------------------------------------------------------------------------------------


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a request body; raise `ApiError` if it is none."""
    try:
        found = json.loads(body.decode("utf-8-sig"))  # strictly: bytes of half a surrogate pair are no text
        if b"\\ud" in body.lower():  # as an escape, half a surrogate pair is JSON, but no text
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is no JSON, or no text: {error}") from error
    if not isinstance(found, dict):
        raise ApiError("the body is no JSON object")
    return found


def get_field(body: Mapping[str, Any], key: str, kind: type[T] | tuple[type[T], ...], default: T, at: str = "") -> T:
    """Return a field of this type, or `default` if it is missing or null; errors name it as `at` + `key`."""
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(one.__name__ for one in kinds)
        raise ApiError(f"{at}{key}: {str(value)[:100]!r} is no {names}")
    return value


def get_number(body: Mapping[str, Any], key: str, low: float, high: float) -> dict[str, float]:
    """Return {key: number} with a number between these bounds, or {} if the client sets none."""
    if body.get(key) is None:
        return {}
    value = get_field(body, key, (float, int), 0)
    if not low <= value <= high:
        raise ApiError(f"{key}: {value} is not between {low:g} and {high:g}")
    return {key: value}


def get_integer(body: Mapping[str, Any], key: str, low: int = 1) -> int | None:
    """Return an integer of at least `low`, or None if the client sets none."""
    if body.get(key) is None:
        return None
    value = get_field(body, key, int, 0)
    if value < low:
        raise ApiError(f"{key}: {value} is less than {low}")
    return value


def get_objects(body: Mapping[str, Any], key: str, at: str = "") -> list[dict[str, Any]]:
    """Return a list of JSON objects."""
    found = get_field(body, key, list, [], at)
    for number, item in enumerate(found):
        if not isinstance(item, dict):
            raise ApiError(f"{at}{key}[{number}]: {str(item)[:100]!r} is no object")
    return found


ReadImage = Callable[
    [Mapping[str, Any], str], bytes
]  # the file of a block's image; the second argument names it in errors


def parse_content(value: Any, at: str, kind: str, read_image: ReadImage) -> tuple[str, tuple[bytes, ...]]:
    """Return the text of a message, as `parse_text` does, and its images: each stands for a marker in the text.

    Args:
        value: The content.
        at: Name of the content, for errors.
        kind: Type of the blocks that are images.
        read_image: Reads such a block.
    """
    blocks = value if isinstance(value, list) else []
    if not any(isinstance(block, dict) and block.get("type") == kind for block in blocks):
        return parse_text(value, at), ()
    texts, images = list[str](), list[bytes]()
    for number, block in enumerate(blocks):
        if isinstance(block, dict) and block.get("type") == kind:
            images.append(read_image(block, f"{at}[{number}]"))
            texts.append(IMAGE_MARKER)
        else:
            texts.append(_text_of_block(block, f"{at}[{number}]"))
    return "".join(texts), tuple(images)


def parse_text(value: Any, at: str) -> str:
    """Return text that is given as a string, as a list of text blocks, or not at all."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "\n".join(_text_of_block(block, f"{at}[{number}]") for number, block in enumerate(value))
    return _require_text(value, at)


def parse_strings(value: Any, at: str) -> tuple[str, ...]:
    """Return the strings of a list, or one string alone; empty strings are left out."""
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list):
        raise ApiError(f"{at}: {str(value)[:100]!r} is no list of strings")
    return tuple(text for item in found if (text := _require_text(item, at)))


def decode_image(content: str, at: str) -> bytes:
    """Return the bytes of an image in base64."""
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise ApiError(f"{at}: is no base64: {error}") from error


def _text_of_block(block: Any, at: str) -> str:
    if not isinstance(block, dict) or not isinstance(block.get("text"), str):
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        raise ApiError(f"{at}: {kind!r} is not supported here, only text is")
    return _require_text(block["text"], f"{at}.text")


def _require_text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise ApiError(f"{at}: {str(value)[:100]!r} is no text")
    return value
