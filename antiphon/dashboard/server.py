"""Serve the dashboard until it is interrupted."""

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from antiphon import __version__
from antiphon.core.errors import ConfigError
from antiphon.dashboard.app import create_app
from antiphon.dashboard.live import Changes
from antiphon.dashboard.model_server import ModelServer
from antiphon.dashboard.security import check_prefix
from antiphon.dashboard.site import Site

SHUTDOWN_SECONDS = 1  # for requests under way to end by themselves


class _Server(uvicorn.Server):
    """A server that ends its streams of changes, which never end by themselves."""

    def __init__(self, config: uvicorn.Config, changes: Changes) -> None:
        super().__init__(config)
        self._changes = changes

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams and then all that is open."""
        self._changes.close()
        await super().shutdown(sockets)


def serve(
    folder: Path,
    cache: Path,
    *,
    host: str,
    port: int,
    token: str,
    prefix: str = "",
    model_server: ModelServer | None = None,
    announce: Callable[[str], None],
) -> None:
    """Serve a folder of runs until SIGINT or SIGTERM.

    Args:
        folder: The folder, or one run.
        cache: Folder for indices.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        token: Token that readers must have.
        prefix: Path at which a proxy shows the dashboard.
        model_server: Server of the model that the chat page talks to.
        announce: Called with the address, token included, once it is ready.

    Raises:
        ConfigError: The folder is none, or the address cannot be listened on.
    """
    prefix = check_prefix(prefix)
    site = Site.make(folder, cache, model_server)
    changes = Changes(site)
    app = create_app(site, token, prefix, __version__, changes)
    with _listen(host, port) as listener:
        place = listener.getsockname()
        shown = f"[{place[0]}]" if ":" in place[0] else place[0]
        announce(f"http://{shown}:{place[1]}{prefix}/?token={token}")
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # it would hold the token
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            limit_concurrency=256,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # uvicorn raises the signal that ended it again
        asyncio.run(_Server(config, changes).serve(sockets=[listener]))


def is_local(host: str) -> bool:
    """Return True if an address is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    try:
        # With the protocol: asyncio sets TCP_NODELAY for none else, and each answer would wait 40 ms for an acknowledgement.
        family, kind, protocol, _, _ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot be listened on: {error}", key="--host, --port", value=f"{host}:{port}") from error
    return listener
