"""OpenAI's text completions: requests, replies, and the chunks that replies are streamed as."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from antiphon.rollout.gateway.chat import (
    ApiError,
    CompletionRequest,
    Reply,
    TextPrompt,
    get_field,
    get_integer,
    parse_strings,
)
from antiphon.rollout.gateway.openai import (
    MOST_CHOICES,
    REASONS,
    count_usage,
    error_body,
    get_choices,
    get_sampling,
    get_stream_usage,
)

__all__ = ["NAME", "Stream", "completion_response", "error_body", "parse_request"]

NAME = "openai"
MAX_TOKENS = 16  # of a completion whose request sets no limit, as OpenAI has it
MOST_LOGPROBS = 1  # of a token; more would be those of tokens that were not sampled
UNSUPPORTED = ("suffix", "logit_bias")


def parse_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Parse the body of a request.

    Raises:
        ApiError: A field is missing, invalid or not supported.
    """
    for key in UNSUPPORTED:
        if body.get(key):
            raise ApiError(f"{key}: is not supported here", code="unsupported_parameter")
    n, prompts = get_choices(body), _prompts(body.get("prompt"))
    if n * len(prompts) > MOST_CHOICES:
        raise ApiError(f"n: {n} completions of {len(prompts)} prompts are more than {MOST_CHOICES}")
    best_of = get_integer(body, "best_of")
    if best_of not in (None, n):
        raise ApiError(f"best_of: {best_of} is not supported here, only n, {n}, is", code="unsupported_parameter")
    logprobs, echo = get_integer(body, "logprobs", low=0), get_field(body, "echo", bool, False)
    if logprobs is not None and logprobs > MOST_LOGPROBS:
        message = f"logprobs: {logprobs} is not supported here: only log-probs of sampled tokens are known, which 0 and 1 give"
        raise ApiError(message, code="unsupported_parameter")
    if echo and logprobs is not None:
        raise ApiError("echo: is not supported here with logprobs: prompts have none", code="unsupported_parameter")
    return CompletionRequest(
        model=get_field(body, "model", str, ""),
        messages=(),
        prompts=prompts,
        echo=echo,
        max_tokens=get_integer(body, "max_tokens") or MAX_TOKENS,
        stop=parse_strings(body.get("stop"), "stop"),
        n=n,
        requested_sampling=get_sampling(body),
        logprobs=logprobs is not None,
        stream=get_field(body, "stream", bool, False),
        stream_usage=get_stream_usage(body),
    )


def _prompts(value: Any) -> tuple[TextPrompt, ...]:
    """Return the prompts: a text, a list of texts, tokens, or a list of lists of tokens."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(each, str) for each in value):
            return tuple(value)
        if _is_tokens(value):
            return (tuple(value),)
        if all(isinstance(each, list) and each and _is_tokens(each) for each in value):
            return tuple(tuple(each) for each in value)
    raise ApiError(
        f"prompt: {str(value)[:100]!r} is no text, list of texts, list of tokens, or list of lists of tokens"
    )


def _is_tokens(value: list[Any]) -> bool:
    return all(isinstance(each, int) and not isinstance(each, bool) and abs(each) < 1 << 31 for each in value)


# --- replies -----------------------------------------------------------------------------------------------------------


def completion_response(
    request: CompletionRequest, identity: str, prompt_tokens: int, replies: Sequence[Reply], token_texts: Any
) -> Mapping[str, Any]:
    """Return the answer in one piece; `token_texts` gives the text of each token."""
    choices = [
        _choice(index, _echoed(request, index) + reply.message.content, reply, request, token_texts)
        for index, reply in enumerate(replies)
    ]
    return {
        **_head(identity, request.model),
        "choices": choices,
        "usage": count_usage(prompt_tokens, replies),
    }


class Stream:
    """Writes the chunks of one answer."""

    ping = b": ping\n\n"

    def __init__(self, request: CompletionRequest, identity: str, prompt_tokens: int, token_texts: Any) -> None:
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._token_texts = token_texts
        self._head = _head(identity, request.model)

    def begin(self) -> Iterator[bytes]:
        """Yield the prompts, if they are echoed."""
        for index in range(len(self._request.prompts) * self._request.n if self._request.echo else 0):
            yield self._event({"choices": [_choice(index, _echoed(self._request, index))]})

    def text(self, piece: str) -> Iterator[bytes]:
        """Yield more text of the only reply."""
        yield self._event({"choices": [_choice(0, piece)]})

    def end(self, replies: Sequence[Reply], said: str) -> Iterator[bytes]:
        """Yield all that is left; `said` is the text of the only reply that was written already."""
        for index, reply in enumerate(replies):
            rest = reply.message.content.removeprefix(said)
            yield self._event({"choices": [_choice(index, rest, reply, self._request, self._token_texts)]})
        if self._request.stream_usage:
            yield self._event({"choices": [], "usage": count_usage(self._prompt_tokens, replies)})
        yield b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """Yield an error in place of the rest."""
        yield f"data: {json.dumps(error_body(error))}\n\n".encode()

    def _event(self, more: Mapping[str, Any]) -> bytes:
        return f"data: {json.dumps({**self._head, **more})}\n\n".encode()


def _head(identity: str, model: str) -> dict[str, Any]:
    return {"id": identity, "object": "text_completion", "created": int(time.time()), "model": model}


def _echoed(request: CompletionRequest, index: int) -> str:
    """Return the text of the prompt of a choice, if it is to be repeated."""
    return request.texts[index // request.n] if request.echo else ""


def _choice(
    index: int, text: str, reply: Reply | None = None, request: CompletionRequest | None = None, token_texts: Any = None
) -> dict[str, Any]:
    """Return one choice, or a chunk of one that goes on if there is no reply yet."""
    logprobs = _logprobs(reply, token_texts) if reply is not None and request is not None and request.logprobs else None
    reason = None if reply is None else REASONS[reply.reason]
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(reply: Reply, token_texts: Any) -> Mapping[str, Any]:
    """Return log-probs of the sampled tokens; no others are known. -9999 replaces values that JSON cannot express."""
    texts = token_texts(reply.completion.tokens)
    known = [value if math.isfinite(value) else -9999.0 for value in map(float, reply.completion.logprobs)]
    offsets = list(accumulate(map(len, texts[:-1]), initial=0))[: len(texts)]
    return {"tokens": texts, "token_logprobs": known, "top_logprobs": None, "text_offset": offsets}
