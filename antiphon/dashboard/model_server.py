"""The server of a model that the chat page talks to: `antiphon serve`, or another one with OpenAI's protocol."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from antiphon.core.errors import ConfigError
from antiphon.dashboard.errors import RequestError

SECONDS = 300.0  # of one answer
MOST_ANSWER = 4 << 20  # bytes


class ModelServerError(RequestError):
    """The model server cannot be reached, refuses, or answers with something else than a completion."""

    status = 502


class ModelServer:
    """Asks one model."""

    def __init__(self, address: str, token: str = "") -> None:
        """Name a server; nothing is sent to it yet.

        Args:
            address: Base URL, such as `http://127.0.0.1:8000/v1`.
            token: Sent with each request; empty for none.

        Raises:
            ConfigError: The address is no URL of HTTP.
        """
        place = urlsplit(address)
        if place.scheme not in ("http", "https") or not place.hostname or place.query or place.fragment:
            raise ConfigError("must be a URL such as http://127.0.0.1:8000/v1", key="--model-server", value=address)
        self.address = address.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def complete(self, prompt: Sequence[int], samples: int, settings: Mapping[str, float]) -> list[str]:
        """Return so many completions of a prompt of token ids."""
        body = {"model": "policy", "prompt": list(prompt), "n": samples, **settings}
        return [each["text"] for each in await self._ask("/completions", body, "text")]

    async def reply(self, messages: Sequence[Mapping[str, str]], settings: Mapping[str, float]) -> str:
        """Return the reply to a conversation."""
        body = {"model": "policy", "messages": list(messages), **settings}
        choice, *_ = await self._ask("/chat/completions", body, "message")
        return str(choice["message"].get("content") or "")

    async def _ask(self, path: str, body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
        """Return the choices of an answer, each with a key."""
        try:
            async with asyncio.timeout(SECONDS), httpx.AsyncClient(headers=self._headers, timeout=SECONDS) as client:
                status, content = await self._receive(client, path, body)
        except (httpx.HTTPError, TimeoutError) as error:
            raise ModelServerError(f"{self.address} does not answer: {str(error) or type(error).__name__}") from error
        try:
            answer = json.loads(content)
            if status == httpx.codes.OK:
                kind = str if key == "text" else dict
                choices = [each for each in answer["choices"] if isinstance(each[key], kind)]
                if choices:
                    return choices
            reason = str(answer["error"]["message"])[:500]
        except (ValueError, LookupError, TypeError):
            reason = "its answer is no completion"
        raise ModelServerError(f"{self.address}{path}: HTTP {status}: {reason}")

    async def _receive(self, client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        async with client.stream("POST", self.address + path, json=body) as response:
            content = b""
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > MOST_ANSWER:
                    raise ModelServerError(f"{self.address}: the answer has more than {MOST_ANSWER:,} bytes")
        return response.status_code, content
