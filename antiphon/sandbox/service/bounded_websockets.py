"""Websockets that end if their peer takes too little of what they write.

A peer that sends pings and reads nothing would otherwise have its pongs kept in memory, without a bound. To stop reading
instead would not do: two ends that both wait for the other to read would wait for ever.
"""

import asyncio

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import InvalidState

LARGEST_MESSAGE = 16 << 20  # bytes, either way
MOST_UNREAD = 2 * LARGEST_MESSAGE  # bytes; more than any message and what may wait before it


class BoundedServer(WebSocketsSansIOProtocol):
    """The websocket protocol of uvicorn."""

    def data_received(self, data: bytes) -> None:
        """Handle what has arrived."""
        super().data_received(data)
        _end_if_unread(self.transport)

    def shutdown(self) -> None:
        """End the connection, also one that is being closed."""
        try:
            super().shutdown()
        except InvalidState:
            self.transport.abort()


class BoundedClient(ClientConnection):
    """A connection of the package websockets."""

    transport: asyncio.Transport

    def data_received(self, data: bytes) -> None:
        """Handle what has arrived."""
        super().data_received(data)
        _end_if_unread(self.transport)


def _end_if_unread(transport: asyncio.Transport) -> None:
    if transport.get_write_buffer_size() > MOST_UNREAD:
        transport.abort()
