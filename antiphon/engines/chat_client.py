"""A client of models that others serve by OpenAI's chat protocol, such as judges."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

PAUSE = 0.5  # seconds before a request is tried again the first time; doubles each time
LONGEST_PAUSE = 30.0
RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class ChatRequestError(Exception):
    """The model did not reply within all attempts."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Reply of a model; `truncated` says that its limit of tokens cut it off."""

    content: str
    truncated: bool = False


@dataclass(slots=True)
class ChatUsage:
    """Counts of requests sent to a model, and of tokens as the server counts them."""

    requests: int = 0  # tries included
    retries: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    uncounted: int = 0  # replies that did not say how many tokens they took


class OpenAIChatClient:
    """Sends chats to a model. `usage` counts what was sent."""

    def __init__(self, address: str, model: str, key: str = "", *, attempts: int = 5, timeout: float = 60.0) -> None:
        """Create a client.

        Args:
            address: Such as https://api.example.com/v1.
            model: Name of the model there.
            key: API key; empty for none.
            attempts: How often a request is tried.
            timeout: Seconds of one attempt.
        """
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url = address.rstrip("/") + "/chat/completions"
        self._model = model
        self._attempts = attempts
        self._timeout = timeout
        self.usage = ChatUsage()
        # Callers limit how many requests run at once.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits)

    async def __call__(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """Return the text of the model's reply; see `ask`."""
        return (await self.ask(messages, **settings)).content

    async def ask(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> ChatReply:
        """Return the reply of the model.

        Args:
            messages: The chat, with role and content.
            settings: Further fields of the request, such as temperature.

        Raises:
            ChatRequestError: If it does not reply.
        """
        body = {"model": self._model, "messages": list(messages), **settings}
        for attempt in range(1, self._attempts + 1):
            self.usage.requests += 1
            self.usage.retries += attempt > 1
            try:
                async with asyncio.timeout(self._timeout):  # httpx's own time-out is for each packet
                    response = await self._client.post(self._url, json=body)
            except (httpx.HTTPError, TimeoutError) as error:
                failure, again, pause = f"{type(error).__name__} {error}".strip(), True, 0.0
            else:
                if response.status_code == httpx.codes.OK:
                    self._count(response)
                    return _reply(response)
                failure = f"HTTP {response.status_code} {response.text[:200]}".strip()
                again, pause = response.status_code in RETRIED_STATUSES, _requested_pause(response)
            if not again or attempt == self._attempts:
                break
            await asyncio.sleep(min(max(pause, PAUSE * 2 ** (attempt - 1)), LONGEST_PAUSE))
        raise ChatRequestError(f"{self._url}: {failure}, the last of {attempt} tries")

    def _count(self, response: httpx.Response) -> None:
        try:
            told = response.json()["usage"]
            tokens = int(told["prompt_tokens"]), int(told["completion_tokens"])
        except (ValueError, LookupError, TypeError):
            self.usage.uncounted += 1
            return
        self.usage.input_tokens += tokens[0]
        self.usage.output_tokens += tokens[1]

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _reply(response: httpx.Response) -> ChatReply:
    content, finish = None, None
    with suppress(json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError):
        choice = response.json()["choices"][0]
        content, finish = choice["message"]["content"], choice.get("finish_reason")
    if content is None and finish == "length":  # cut off before its first word, in its reasoning
        content = ""
    if not isinstance(content, str):
        raise ChatRequestError(f"{response.url}: the answer is not a chat completion: {response.text[:200]!r}")
    return ChatReply(content, finish == "length")


def _requested_pause(response: httpx.Response) -> float:
    """Return the seconds that the server asks to wait."""
    asked = response.headers.get("retry-after", "")
    return float(asked) if asked.isdigit() else 0.0
