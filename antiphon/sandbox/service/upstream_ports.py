"""Ports of sandboxes that another service holds, reached by a websocket to that service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ValidationError
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Response

from antiphon.sandbox.service.bounded_websockets import BoundedClient
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.rock import STATUS_CODES
from antiphon.sandbox.service.routes import SANDBOX
from antiphon.sandbox.sessions.pipe_reader import CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """Address of a service: a URL, or a Unix socket."""

    url: str
    socket: Path | None = None

    @asynccontextmanager
    async def connect(self, sandbox_id: str, port: int, token: str) -> AsyncIterator["PortOfUpstream"]:
        """Connect to a port of a sandbox for as long as the block runs.

        Raises:
            RefusedError: The service refuses it.
            OSError: The service does not answer.
            WebSocketException: As `OSError`.
        """
        url = f"{self.url.replace('http', 'ws', 1)}{SANDBOX}/sandboxes/{sandbox_id}/portforward?port={port}"
        opening = partial(connect, proxy=None) if self.socket is None else partial(unix_connect, str(self.socket))
        headers = {"Authorization": f"Bearer {token}"}
        try:
            connection = await opening(
                uri=url,
                additional_headers=headers,
                compression=None,
                ping_timeout=None,  # as for clients of a service
                create_connection=BoundedClient,
            )
        except InvalidStatus as error:
            raise _refusal(error.response) from error
        async with connection:
            yield PortOfUpstream(connection)


class PortOfUpstream:
    """A connection to a port of a sandbox."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def receive(self) -> bytes:
        """Return what has arrived; nothing once the other side has closed the connection."""
        try:
            return await self._connection.recv(decode=False)
        except ConnectionClosed:
            return b""

    async def send(self, content: bytes) -> None:
        """Send; raise `OSError` if the other side has closed the connection."""
        try:
            for begin in range(0, len(content), CHUNK):  # a message has a largest size
                await self._connection.send(content[begin : begin + CHUNK])
        except ConnectionClosed as error:
            raise BrokenPipeError(str(error)) from error


class _Failure(BaseModel):
    error: str


def _refusal(response: Response) -> RefusedError:
    """Return the error of a service's refusal, as it says itself."""
    reasons = {status: reason for reason, (status, _) in STATUS_CODES.items()}
    try:
        message = _Failure.model_validate_json(response.body or b"").error
    except ValidationError:
        message = f"HTTP status {response.status_code}"
    return RefusedError(reasons.get(response.status_code, Reason.FAILED), message)
