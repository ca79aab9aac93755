"""Anthropic's messages: requests, replies, and the events that replies are streamed as."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from antiphon.core.types import IMAGE_MARKER, Message, ToolCall
from antiphon.rollout.gateway.chat import (
    ApiError,
    ChatRequest,
    Reply,
    decode_image,
    get_field,
    get_integer,
    get_number,
    get_objects,
    parse_content,
    parse_strings,
    parse_text,
)

NAME = "anthropic"
REASONS = {"stop": "end_turn", "stop_string": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
THINKING = ("thinking", "redacted_thinking")  # blocks that we give to nobody: what a model thinks aloud is in its text
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def parse_request(body: Mapping[str, Any]) -> ChatRequest:
    """Parse the body of a request.

    Raises:
        ApiError: A field is missing, invalid or not supported.
    """
    system = parse_text(body.get("system"), "system")
    messages = [Message("system", system)] if system else []
    for number, item in enumerate(get_objects(body, "messages")):
        messages += _messages(item, f"messages[{number}]")
    return ChatRequest(
        model=get_field(body, "model", str, ""),
        messages=tuple(messages),
        tools=tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(get_objects(body, "tools"))),
        choice=_choice(get_field(body, "tool_choice", dict, {})),
        max_tokens=get_integer(body, "max_tokens"),
        stop=parse_strings(body.get("stop_sequences"), "stop_sequences"),
        requested_sampling=get_number(body, "temperature", 0, 1)
        | get_number(body, "top_p", 0, 1)
        | get_number(body, "top_k", 0, 2**31),
        stream=get_field(body, "stream", bool, False),
    )


def _messages(item: Mapping[str, Any], at: str) -> list[Message]:
    """One of theirs may be several of ours: the results of tools are messages here."""
    role = get_field(item, "role", str, "", f"{at}.")
    if role not in ("user", "assistant", "system"):
        raise ApiError(f"{at}.role: {role!r} is not user or assistant")
    content = item.get("content")
    blocks = (
        get_objects(item, "content", f"{at}.") if isinstance(content, list) else [{"type": "text", "text": content}]
    )
    text: list[str] = []
    images: list[bytes] = []
    calls: list[ToolCall] = []
    found: list[Message] = []
    for number, block in enumerate(blocks):
        here, kind = f"{at}.content[{number}]", block.get("type")
        if kind == "text":
            text.append(parse_text(block.get("text"), f"{here}.text"))
        elif kind == "image" and role == "user":
            images.append(_image(block, here))
            text.append(IMAGE_MARKER)
        elif kind == "tool_use" and role == "assistant":
            identity = get_field(block, "id", str, "", f"{here}.")
            calls.append(
                ToolCall(
                    get_field(block, "name", str, "", f"{here}."),
                    get_field(block, "input", dict, {}, f"{here}."),
                    identity,
                )
            )
        elif kind == "tool_result" and role == "user":
            answered = get_field(block, "tool_use_id", str, "", f"{here}.")
            result, shown = parse_content(block.get("content"), f"{here}.content", "image", _image)
            found.append(Message("tool", result, tool_call_id=answered, images=shown))
        elif kind not in THINKING:
            raise ApiError(f"{here}: {kind!r} in a message of the {role} is not supported here")
    if text or calls or not found:
        joined = ("" if images else "\n").join(text)
        found.append(Message(role, joined, tuple(calls), images=tuple(images)))  # type: ignore[arg-type]
    return found


def _image(block: Mapping[str, Any], at: str) -> bytes:
    """Return the file of an image block; nothing is fetched from elsewhere."""
    source = get_field(block, "source", dict, {}, f"{at}.")
    if source.get("type") != "base64":
        raise ApiError(f"{at}.source.type: {source.get('type')!r} is not base64; images are not fetched")
    return decode_image(get_field(source, "data", str, "", f"{at}.source."), f"{at}.source.data")


def _tool(tool: Mapping[str, Any], at: str) -> Mapping[str, Any]:
    name = get_field(tool, "name", str, "", f"{at}.")
    if not name or "input_schema" not in tool:
        raise ApiError(
            f"{at}: {tool.get('type') or name!r} has no name and input_schema: only the client's own tools work"
        )
    function = {
        "name": name,
        "description": get_field(tool, "description", str, ""),
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def _choice(value: Mapping[str, Any]) -> str:
    match value.get("type", "auto"):
        case "auto" | "none" as kind:
            return str(kind)
        case "any":
            return "required"
        case "tool":
            return f"={get_field(value, 'name', str, '', 'tool_choice.')}"
    raise ApiError(f"tool_choice.type: {value['type']!r} is not auto, any, tool or none")


# --- replies -----------------------------------------------------------------------------------------------------------


def completion_response(
    chat: ChatRequest, identity: str, prompt_tokens: int, replies: Sequence[Reply], token_texts: Any
) -> Mapping[str, Any]:
    """The answer in one piece."""
    (reply,) = replies
    text = [{"type": "text", "text": reply.message.content}] if reply.message.content else []
    calls = [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in reply.message.tool_calls]
    return {
        **_head(chat, identity),
        "content": [*text, *calls],
        "stop_reason": REASONS[reply.reason],
        "stop_sequence": reply.stop,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": len(reply.completion.tokens)},
    }


def _head(chat: ChatRequest, identity: str) -> Mapping[str, Any]:
    return {"id": identity, "type": "message", "role": "assistant", "model": chat.model}


class Stream:
    """Writes the events of one answer."""

    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, chat: ChatRequest, identity: str, prompt_tokens: int, token_texts: Any) -> None:
        self._message = {
            **_head(chat, identity),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }
        self._blocks = 0
        self._open = False  # a block of text

    def begin(self) -> Iterator[bytes]:
        """Before anything is known."""
        yield _event("message_start", message=self._message)

    def text(self, piece: str) -> Iterator[bytes]:
        """More text."""
        if not self._open:
            self._open = True
            yield self._start({"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": piece})

    def end(self, replies: Sequence[Reply], said: str) -> Iterator[bytes]:
        """All that is left; `said` is the text that was written already."""
        (reply,) = replies
        if rest := reply.message.content.removeprefix(said):
            yield from self.text(rest)
        if self._open:
            yield self._stop()
        for call in reply.message.tool_calls:
            yield self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            yield self._stop()
        delta = {"stop_reason": REASONS[reply.reason], "stop_sequence": reply.stop}
        yield _event("message_delta", delta=delta, usage={"output_tokens": len(reply.completion.tokens)})
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """It came to nothing."""
        yield _event("error", **{key: value for key, value in error_body(error).items() if key != "type"})

    def _start(self, block: Mapping[str, Any]) -> bytes:
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _stop(self) -> bytes:
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def error_body(error: ApiError) -> Mapping[str, Any]:
    """The body of an answer that is an error."""
    kind = ERRORS.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def list_models(name: str) -> Mapping[str, Any]:
    """The answer to what models there are."""
    model = {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"data": [model], "has_more": False, "first_id": name, "last_id": name}
