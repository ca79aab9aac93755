"""Network access of a shell sandbox: none, or HTTP and HTTPS to a list of hosts and ports.

A sandbox has no network but its own loopback. If hosts are allowed, a proxy outside listens on a Unix socket that the sandbox
can see, and a forwarder inside listens on the loopback and passes bytes on to it; `http_proxy` and `https_proxy` name the
forwarder. The proxy connects only to hosts on the list, by exactly the name on the list, and refuses all others.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from antiphon.core.errors import ConfigError

PORT = 3128  # of the forwarder inside
PROXIES = dict.fromkeys(("http_proxy", "https_proxy"), f"http://127.0.0.1:{PORT}")  # environment variables inside
LONGEST_HEAD = 1 << 15  # bytes of a request line and headers
HEAD_SECONDS = 30.0  # for the head to arrive and the connection to be made
IDLE_SECONDS = 300.0  # without new bytes either way, after which a connection is closed
MOST_CONNECTIONS = 32  # at once

# The forwarder's program. It returns as soon as it listens, and continues in a process of its own.
FORWARDER = r"""
import os, socket, threading
server = socket.create_server(("127.0.0.1", {port}))
if os.fork():
    os._exit(0)
os.setsid()
def copy(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass
def serve(client):
    with client, socket.socket(socket.AF_UNIX) as proxy:
        proxy.connect("{path}")
        back = threading.Thread(target=copy, args=(proxy, client), daemon=True)
        back.start()
        copy(client, proxy)
        back.join()
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


def parse_hosts(allowed: Sequence[str]) -> frozenset[tuple[str, int]]:
    """Return the (host, port) of each `host:port`; raise `ConfigError` if one is malformed."""
    found = set()
    for text in allowed:
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536 or set(host) & set("/@* "):
            message = f"{text!r} is not a host and a port such as example.org:443"
            raise ConfigError(message, key="network", value=text)
        found.add((host.strip("[]").lower(), int(port)))
    return frozenset(found)


class Egress:
    """The proxy of one sandbox."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """Allow these hosts, each as `host:port`."""
        self._allowed = parse_hosts(allowed)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, path: Path) -> None:
        """Listen on a socket at `path`."""
        self._server = await asyncio.start_unix_server(self._accept, path, limit=LONGEST_HEAD)
        path.chmod(0o666)

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MOST_CONNECTIONS:
            writer.close()
            return
        connection = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="egress")
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: read the request, then copy bytes both ways until an end closes or is silent too long."""
        out: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                host, port, head = _parse_request(await reader.readuntil(b"\r\n\r\n"))
                if (host, port) not in self._allowed:
                    await _answer(writer, f"403 {host}:{port} is not allowed from this sandbox")
                    return
                back, out = await asyncio.open_connection(host, port)
                if head:
                    out.write(head)
                else:
                    await _answer(writer, "200 connected")
            async with asyncio.timeout(
                IDLE_SECONDS
            ) as idle:  # one for both ways: a download has nothing to say for long
                await asyncio.gather(_copy(reader, out, idle), _copy(back, writer, idle))
        except ValueError as error:
            await _answer(writer, f"400 {error}")
        except (OSError, EOFError, asyncio.LimitOverrunError):  # one end is gone or silent
            pass
        finally:
            for end in (writer, out):
                if end is not None:
                    end.close()


def _parse_request(head: bytes) -> tuple[str, int, bytes]:
    """Return host, port, and the bytes to send there first (none for CONNECT).

    Raises:
        ValueError: This is not a request to a proxy.
    """
    line, *headers = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, target, protocol = [*line.split(" "), "", ""][:3]
    if not protocol.startswith("HTTP/1."):
        raise ValueError("only HTTP/1 is supported")
    url = urlsplit(f"//{target}" if method == "CONNECT" else target)
    port = url.port or (80 if url.scheme == "http" else 0)
    if not url.hostname or not port or url.scheme not in ("", "http") or (method != "CONNECT" and not url.scheme):
        raise ValueError("the request must be CONNECT, or name http://host/path")
    if method == "CONNECT":
        return url.hostname, port, b""
    path = url._replace(scheme="", netloc="", fragment="").geturl() or "/"
    kept = [header for header in headers if not header.lower().startswith(("host:", "connection:", "proxy-", "keep-"))]
    lines = [f"{method} {path} {protocol}", f"Host: {url.netloc.rpartition('@')[2]}", "Connection: close", *kept]
    return url.hostname, port, ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _answer(writer: asyncio.StreamWriter, line: str) -> None:
    with suppress(OSError):
        writer.write(f"HTTP/1.1 {line}\r\n\r\n".encode("latin-1", "replace"))
        await writer.drain()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, idle: asyncio.Timeout) -> None:
    while content := await source.read(1 << 16):
        target.write(content)
        await target.drain()
        idle.reschedule(asyncio.get_running_loop().time() + IDLE_SECONDS)
    target.write_eof()
