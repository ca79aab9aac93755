"""OpenAI's chat completions: requests, replies, and the chunks that replies are streamed as."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from antiphon.core.types import Message, ToolCall
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
)

NAME = "openai"
REASONS = {"stop": "stop", "stop_string": "stop", "length": "length", "tool_calls": "tool_calls"}
ROLES: dict[str, Any] = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
MOST_CHOICES = 128
UNSUPPORTED = ("functions", "function_call", "audio", "prediction", "logit_bias")


def parse_request(body: Mapping[str, Any]) -> ChatRequest:
    """Parse the body of a request.

    Raises:
        ApiError: A field is missing, invalid or not supported.
    """
    _require_supported(body)
    return ChatRequest(
        model=get_field(body, "model", str, ""),
        messages=tuple(
            _message(item, f"messages[{number}]") for number, item in enumerate(get_objects(body, "messages"))
        ),
        tools=tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(get_objects(body, "tools"))),
        choice=_choice(body.get("tool_choice")),
        max_tokens=get_integer(body, "max_completion_tokens") or get_integer(body, "max_tokens"),
        stop=parse_strings(body.get("stop"), "stop"),
        n=get_choices(body),
        requested_sampling=get_sampling(body),
        logprobs=get_field(body, "logprobs", bool, False),
        stream=get_field(body, "stream", bool, False),
        stream_usage=get_stream_usage(body),
    )


def get_choices(body: Mapping[str, Any]) -> int:
    """Return the number of replies that are asked for."""
    n = get_integer(body, "n") or 1
    if n > MOST_CHOICES:
        raise ApiError(f"n: {n} is more than {MOST_CHOICES}")
    return n


def get_sampling(body: Mapping[str, Any]) -> dict[str, float]:
    """Return the settings of sampling that a client sets."""
    return (
        get_number(body, "temperature", 0, 2)
        | get_number(body, "top_p", 0, 1)
        | get_number(body, "seed", -(2**63), 2**63)
        | get_number(body, "top_k", -1, 2**31)
        | get_number(body, "min_p", 0, 1)
        | get_number(body, "presence_penalty", -2, 2)
        | get_number(body, "frequency_penalty", -2, 2)
        | get_number(body, "repetition_penalty", 0, math.inf)  # as vLLM has it
    )


def get_stream_usage(body: Mapping[str, Any]) -> bool:
    """Return True if a stream is to end with the numbers of tokens."""
    return get_field(get_field(body, "stream_options", dict, {}), "include_usage", bool, False)


def _require_supported(body: Mapping[str, Any]) -> None:
    for key in UNSUPPORTED:
        if body.get(key):
            raise ApiError(f"{key}: is not supported here", code="unsupported_parameter")
    form = get_field(get_field(body, "response_format", dict, {}), "type", str, "text")
    if form != "text":
        raise ApiError(f"response_format: {form!r} is not supported here, only 'text' is", code="unsupported_parameter")


def _message(item: Mapping[str, Any], at: str) -> Message:
    role = get_field(item, "role", str, "", f"{at}.")
    if role not in ROLES:
        raise ApiError(f"{at}.role: {role!r} is not one of {', '.join(ROLES)}")
    calls = get_objects(item, "tool_calls", f"{at}.") if role == "assistant" else []
    content, images = parse_content(item.get("content"), f"{at}.content", "image_url", _image)
    return Message(
        ROLES[role],
        content,
        tuple(_call(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(calls)),
        get_field(item, "tool_call_id", str, "", f"{at}.") if role == "tool" else "",
        images,
    )


def _image(block: Mapping[str, Any], at: str) -> bytes:
    """Return the file of an image that is given as a data URL; nothing is fetched from elsewhere."""
    url = get_field(get_field(block, "image_url", dict, {}, f"{at}."), "url", str, "", f"{at}.image_url.")
    head, _, content = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ApiError(f"{at}.image_url.url: {url[:60]!r} is no data URL of an image in base64; others are not fetched")
    return decode_image(content, f"{at}.image_url.url")


def _call(call: Mapping[str, Any], at: str) -> ToolCall:
    function = get_field(call, "function", dict, {}, f"{at}.")
    name = get_field(function, "name", str, "", f"{at}.function.")
    text = get_field(function, "arguments", str, "", f"{at}.function.")
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(f"{at}.function.arguments: {error}") from error
    if not isinstance(arguments, dict):
        raise ApiError(f"{at}.function.arguments: {text[:100]!r} is no object")
    return ToolCall(name, arguments, get_field(call, "id", str, "", f"{at}."))


def _tool(tool: Mapping[str, Any], at: str) -> Mapping[str, Any]:
    function = get_field(tool, "function", dict, {}, f"{at}.")
    if tool.get("type") != "function" or not get_field(function, "name", str, "", f"{at}.function."):
        raise ApiError(f"{at}: is no function with a name")
    return {"type": "function", "function": function}


def _choice(value: Any) -> str:
    match value:
        case None:
            return "auto"
        case "auto" | "none" | "required":
            return str(value)
        case {"function": {"name": str(name)}}:
            return f"={name}"
    raise ApiError(f"tool_choice: {value!r} is not auto, none, required or a function")


# --- replies -----------------------------------------------------------------------------------------------------------


def completion_response(
    chat: ChatRequest, identity: str, prompt_tokens: int, replies: Sequence[Reply], token_texts: Any
) -> Mapping[str, Any]:
    """The answer in one piece; `token_texts` gives the text of each token."""
    choices = [
        {
            "index": index,
            "message": {
                "role": "assistant",
                "content": reply.message.content or (None if reply.message.tool_calls else ""),
                "refusal": None,
                **({"tool_calls": _calls(reply)} if reply.message.tool_calls else {}),
            },
            "logprobs": _logprobs(reply, token_texts) if chat.logprobs else None,
            "finish_reason": REASONS[reply.reason],
        }
        for index, reply in enumerate(replies)
    ]
    return {
        "id": identity,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": chat.model,
        "choices": choices,
        "usage": count_usage(prompt_tokens, replies),
    }


class Stream:
    """Writes the chunks of one answer."""

    ping = b": ping\n\n"

    def __init__(self, chat: ChatRequest, identity: str, prompt_tokens: int, token_texts: Any) -> None:
        self._chat = chat
        self._prompt_tokens = prompt_tokens
        self._pieces = token_texts
        self._head = {"id": identity, "object": "chat.completion.chunk", "created": int(time.time())}

    def begin(self) -> Iterator[bytes]:
        """Before anything is known."""
        for index in range(self._chat.n):
            yield self._chunk({"role": "assistant", "content": ""}, index=index)

    def text(self, piece: str) -> Iterator[bytes]:
        """More text of the only reply."""
        yield self._chunk({"content": piece})

    def end(self, replies: Sequence[Reply], said: str) -> Iterator[bytes]:
        """All that is left; `said` is the text of the only reply that was written already."""
        for index, reply in enumerate(replies):
            rest = reply.message.content.removeprefix(said)
            logprobs = _logprobs(reply, self._pieces) if self._chat.logprobs else None
            if rest or logprobs:
                yield self._chunk({"content": rest}, index=index, logprobs=logprobs)
            for number, call in enumerate(_calls(reply)):
                yield self._chunk({"tool_calls": [{"index": number, **call}]}, index=index)
            yield self._chunk({}, index=index, reason=REASONS[reply.reason])
        if self._chat.stream_usage:
            yield self._event({"choices": [], "usage": count_usage(self._prompt_tokens, replies)})
        yield b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """It came to nothing."""
        yield f"data: {json.dumps(error_body(error))}\n\n".encode()

    def _chunk(self, delta: Any, *, index: int = 0, reason: str | None = None, logprobs: Any = None) -> bytes:
        return self._event(
            {"choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]}
        )

    def _event(self, more: Mapping[str, Any]) -> bytes:
        return f"data: {json.dumps({**self._head, 'model': self._chat.model, **more})}\n\n".encode()


def error_body(error: ApiError) -> Mapping[str, Any]:
    """The body of an answer that is an error."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def list_models(name: str) -> Mapping[str, Any]:
    """The answer to what models there are."""
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "antiphon"}]}


def _calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in reply.message.tool_calls
    ]


def _logprobs(reply: Reply, token_texts: Any) -> Mapping[str, Any]:
    """Return log-probs of the sampled tokens; no others are known. -9999 replaces values that JSON cannot express."""
    content = [
        {
            "token": text,
            "logprob": logprob if math.isfinite(logprob) else -9999.0,
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in zip(
            token_texts(reply.completion.tokens), map(float, reply.completion.logprobs), strict=True
        )
    ]
    return {"content": content, "refusal": None}


def count_usage(prompt_tokens: int, replies: Sequence[Reply]) -> Mapping[str, int]:
    """Return the numbers of tokens of an answer."""
    sampled = sum(len(reply.completion.tokens) for reply in replies)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}
