"""The HTTP connection of an engine to its server.

Once it has failed, every call raises `WorkerDiedError`.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from antiphon.core.errors import RequestError, UnsupportedError, WorkerDiedError

CONNECT_SECONDS = 10.0
INVALID_STATUSES = frozenset({400, 413, 422})  # with which a server refuses one request


class ServerConnection:
    """Calls a server."""

    def __init__(self, url: str, key: str, on_death: Callable[[WorkerDiedError], None]) -> None:
        """Create a connection.

        Args:
            url: Address of the server, without a path.
            key: API key; empty for none.
            on_death: Called once, when the connection dies.
        """
        self.url = url
        self.death: WorkerDiedError | None = None
        self._on_death = on_death
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # The server may close a connection that is kept alive at any time, which would look like its death.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits)

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Return the decoded answer to a request; None if it is empty.

        Raises:
            WorkerDiedError: If the server does not answer, or answers with an error of its own.
            UnsupportedError: If the server refuses the request.
        """
        if self.death is not None:
            raise self.death
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self.die(f"{type(error).__name__} {error}") from error
        if not response.is_success:
            self._raise_for(response)
        return response.json() if response.content else None

    @asynccontextmanager
    async def stream_lines(self, path: str, body: Any) -> AsyncIterator[AsyncIterator[str]]:
        """Post a request and stream the lines of its answer.

        Raises:
            RequestError: If the server finds the request invalid.
            WorkerDiedError: If it answers with an error of its own.
            UnsupportedError: If it refuses for another reason.
        """
        async with self._client.stream("POST", path, json=body) as response:
            if not response.is_success:
                await response.aread()
                if response.status_code in INVALID_STATUSES:
                    raise RequestError(f"{self.url} refuses a request: {response.text[:300]}")
                self._raise_for(response)
            yield _split_lines(response)

    def die(self, reason: str) -> WorkerDiedError:
        """Give the server up, if that has not happened yet; return the error that says why."""
        if self.death is None:
            self.death = WorkerDiedError(f"the server at {self.url} is lost: {reason}")
            self._on_death(self.death)
        return self.death

    def _raise_for(self, response: httpx.Response) -> None:
        message = f"HTTP {response.status_code} for {response.request.url.path}: {response.text[:300]}"
        if response.is_server_error:
            raise self.die(message)
        raise UnsupportedError(f"{self.url} answers {message}")


async def _split_lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the lines of an answer. `aiter_lines` would also split at U+2028 and others, which JSON has inside strings."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
