"""The listening socket of the gateway and the server on it."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from antiphon.core.errors import ConfigError

BACKLOG = 4096  # connections that may wait to be accepted: agents all start at once


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to its program."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers as they are."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise `ConfigError` if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"host: {host!r}, port: {port}: cannot listen there: {error.strerror}") from error
    return listener
