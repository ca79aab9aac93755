"""Ports of sandboxes, for clients: as bytes over a websocket, and by a proxy for HTTP and websockets.

What answers is a program of the sandbox, which nobody trusts. It never gets the service's token or a cookie, and a browser
treats its pages as those of a site that is no other.
"""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpcore
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.typing import Subprotocol

from antiphon.sandbox.service import rock
from antiphon.sandbox.service.bounded_websockets import LARGEST_MESSAGE, BoundedClient
from antiphon.sandbox.service.bounds import LONGEST_MESSAGE, run_while_connected
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.manager import ID
from antiphon.sandbox.service.routes import SANDBOX, Answer

PORTS = range(1024, 65536)  # that clients may reach
DEFAULT_PORT = 8080  # of the proxy, if a request names none
PORT_IN_QUERY = "rock_target_port"
CHUNK = 1 << 16  # bytes

_PATH = re.compile(f"({SANDBOX}/sandboxes/({ID.pattern})/(portforward|proxy))(?:/(.*))?", re.DOTALL)
_PORT_IN_PATH = re.compile(r"port/(\d{1,5})(?:/(.*))?", re.DOTALL)
_OF_ONE_CONNECTION = "connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade"
_NOT_SENT = {*_OF_ONE_CONNECTION.split(), "host", "cookie", "expect", "content-length", "x-rock-target-port"}
# What would hold for the whole service in a browser, beside what holds for a connection.
_OF_ONE_ORIGIN = (
    "set-cookie clear-site-data strict-transport-security alt-svc nel report-to reporting-endpoints www-authenticate"
)
_NOT_RETURNED = {*_OF_ONE_CONNECTION.split(), *_OF_ONE_ORIGIN.split(), "service-worker-allowed", "location"}
# The page is of an origin of its own, so that its scripts cannot use what a browser sends to this service.
_PAGE = (b"content-security-policy", b"sandbox allow-downloads allow-forms allow-popups allow-scripts")


class Stream(Protocol):
    """A connection to a port."""

    async def receive(self) -> bytes:
        """Return what has arrived; nothing once the other side has closed the connection."""

    async def send(self, content: bytes) -> None:
        """Send; raise `OSError` if the other side has closed the connection."""


Connect = Callable[[str, int], AbstractAsyncContextManager[Stream]]
"""Connects to a port of a sandbox, by its id. Raises `RefusedError`."""


class Ports:
    """The ASGI application of the routes for ports. It expects requests that carry the token."""

    def __init__(self, connect: Connect, largest: int) -> None:
        """`largest`: bytes of a request."""
        self._connect = connect
        self._largest = largest

    def serves(self, scope: Mapping[str, Any]) -> bool:
        """Return True if a request is for a route of this application."""
        return scope["type"] == "websocket" or _match(scope) is not None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        begun = False

        async def send_noted(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] in ("http.response.start", "websocket.accept")
            await send(message)

        try:
            await self._handle(scope, receive, send_noted)
        except (ClientDisconnect, WebSocketDisconnect):
            pass
        except asyncio.CancelledError:
            if not begun:  # else the service ends, and uvicorn would report this as an error
                raise
        except HTTPException as error:
            await Answer(rock.failure(str(error.detail), rock.BAD_REQUEST), error.status_code)(scope, receive, send)
        except RefusedError as error:
            status, code = rock.STATUS_CODES[error.reason]
            if not begun:  # else the connection ends before the answer does, which the client notices
                await Answer(rock.failure(str(error)[:LONGEST_MESSAGE], code), status)(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (found := _match(scope)) is None:
            raise RefusedError(Reason.UNKNOWN, "there is no such websocket")
        prefix, sandbox_id, kind, path = found.groups("")
        port, path = _choose_port(kind, path, Headers(scope=scope), QueryParams(scope["query_string"]))
        target = f"/{path}{_query(scope)}"
        if scope.get("method") == "CONNECT":
            raise HTTPException(405, "Method Not Allowed")
        if scope["type"] == "http" and kind == "proxy":
            await self._proxy(Request(scope, receive), send, sandbox_id, port, target, prefix)
        elif scope["type"] == "http":
            raise RefusedError(Reason.INPUT, "portforward takes a websocket; proxy takes HTTP")
        elif kind == "portforward":
            await self._forward(WebSocket(scope, receive, send), sandbox_id, port)
        else:
            await self._proxy_websocket(WebSocket(scope, receive, send), sandbox_id, port, target)

    async def _forward(self, client: WebSocket, sandbox_id: str, port: int) -> None:
        async with self._connect(sandbox_id, port) as stream:
            await client.accept()

            async def send() -> None:
                while (content := await _receive(client)) is not None:
                    await stream.send(content.encode() if isinstance(content, str) else content)

            async def receive() -> None:
                while content := await stream.receive():
                    await client.send_bytes(content)

            await _close(client, await _run_until_one_ends(send(), receive()))

    # --- the proxy ---------------------------------------------------------------------------------------------------

    async def _proxy(self, request: Request, send: Any, sandbox_id: str, port: int, target: str, prefix: str) -> None:
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > self._largest:
                raise HTTPException(413, f"the request is larger than {self._largest} bytes")

        async def answer() -> None:
            async with self._connect(sandbox_id, port) as stream:
                url = httpcore.URL(scheme="http", host="127.0.0.1", port=port, target=target)
                own = [("host", f"127.0.0.1:{port}"), *([("content-length", str(len(content)))] if content else [])]
                headers = [*_kept(request.headers.raw, _NOT_SENT), *((a.encode(), b.encode()) for a, b in own)]
                server = httpcore.AsyncHTTP11Connection(url.origin, _HTTPStream(stream))
                asked = httpcore.Request(request.method, url, headers=headers, content=bytes(content))
                found = await server.handle_async_request(asked)
                if found.status >= 600:
                    raise RefusedError(Reason.FAILED, f"port {port}: the answer has the HTTP status {found.status}")
                framed = any(name.lower() == b"transfer-encoding" for name, _ in found.headers)
                dropped = _NOT_RETURNED | ({"content-length"} if framed else set())  # of two, only one can count
                headers = [*_kept(found.headers, dropped), *_location(found.headers, prefix, port), _PAGE]
                await send({"type": "http.response.start", "status": found.status, "headers": headers})
                async for part in found.aiter_stream():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body"})

        try:
            await run_while_connected(request.receive, answer())
        except (httpcore.NetworkError, OSError) as error:
            raise RefusedError(Reason.FAILED, f"port {port}: the program that listens there sent no answer") from error
        except httpcore.ProtocolError as error:
            raise RefusedError(Reason.FAILED, f"port {port}: the answer is not HTTP/1.1") from error

    async def _proxy_websocket(self, client: WebSocket, sandbox_id: str, port: int, target: str) -> None:
        wanted = [Subprotocol(name) for name in client.scope["subprotocols"]]
        async with self._connect(sandbox_id, port) as stream, _as_socket(stream) as end:
            try:
                server = await connect(
                    f"ws://127.0.0.1:{port}{target}",
                    sock=end,
                    subprotocols=wanted or None,
                    compression=None,
                    proxy=None,
                    max_size=LARGEST_MESSAGE,
                    ping_timeout=None,
                    create_connection=BoundedClient,
                )
            except (OSError, WebSocketException, ValueError) as error:  # the last of a redirection
                raise RefusedError(
                    Reason.FAILED, f"port {port}: it accepts no websocket at {target}: {error}"
                ) from error
            async with server:
                await client.accept(server.subprotocol)

                async def send() -> None:
                    while (content := await _receive(client)) is not None:
                        await server.send(content)

                async def receive() -> None:
                    async for content in server:
                        await (client.send_text(content) if isinstance(content, str) else client.send_bytes(content))

                await _close(client, await _run_until_one_ends(send(), receive()))


class _HTTPStream(httpcore.AsyncNetworkStream):
    """A connection to a port, as httpcore takes one."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return what has arrived."""
        return await self._stream.receive()

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send."""
        try:
            await self._stream.send(buffer)
        except OSError as error:
            raise httpcore.WriteError(error) from error

    async def aclose(self) -> None:
        """Do nothing: who has opened the connection closes it."""


@asynccontextmanager
async def _as_socket(stream: Stream) -> AsyncIterator[socket.socket]:
    """Yield one end of a socket pair whose other end is copied from and to a connection."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_connection(sock=ours)

        async def send() -> None:
            while content := await reader.read(CHUNK):
                await stream.send(content)

        async def receive() -> None:
            while content := await stream.receive():
                writer.write(content)
                await writer.drain()

        copying = asyncio.create_task(_run_until_one_ends(send(), receive()))
        copying.add_done_callback(lambda _: writer.close())
        try:
            yield theirs
        finally:
            copying.cancel()
            await asyncio.wait([copying])


def _match(scope: Mapping[str, Any]) -> re.Match[str] | None:
    return _PATH.fullmatch(scope["raw_path"].decode("latin-1"))


async def _run_until_one_ends(*works: Any) -> Exception | None:
    """Run them at once until one returns, or an end of a connection is gone; return the error that tells so, if any."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    except (OSError, ConnectionClosed, WebSocketDisconnect) as error:
        return error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return None


async def _close(client: WebSocket, problem: Exception | None) -> None:
    """Close a websocket, unless it is closed; the code tells a client that something was wrong."""
    with suppress(RuntimeError, WebSocketDisconnect):
        await client.close(1000 if problem is None else 1011)


async def _receive(client: WebSocket) -> str | bytes | None:
    """Return the next message of a client; None if it has disconnected."""
    message = await client.receive()
    if message["type"] == "websocket.disconnect":
        return None
    text: str | None = message.get("text")
    return message["bytes"] if text is None else text


def _choose_port(kind: str, path: str, headers: Headers, query: QueryParams) -> tuple[int, str]:
    """Return the port that a request is for, and the path that is meant for the program there."""
    if kind == "portforward":
        given = [query.get("port", "")]
    else:
        in_path = _PORT_IN_PATH.fullmatch(path)
        places = [in_path and in_path[1], headers.get("x-rock-target-port"), query.get(PORT_IN_QUERY)]
        given = [text for text in places if text is not None]
        path = (in_path[2] or "") if in_path else path
    if len(given) > 1:
        raise RefusedError(Reason.INPUT, f"port: give one, and in one place, not {' and '.join(given)[:100]}")
    text = given[0] if given else str(DEFAULT_PORT)
    port = int(text) if re.fullmatch("[0-9]{1,5}", text) else 0
    if port not in PORTS:
        raise RefusedError(Reason.INPUT, f"port: {text[:100]!r} must be a number from {PORTS[0]} to {PORTS[-1]}")
    return port, path


def _query(scope: Mapping[str, Any]) -> str:
    """Return the query that is meant for the program, with its question mark."""
    parts = scope["query_string"].decode("latin-1").split("&")
    kept = "&".join(part for part in parts if part.partition("=")[0] != PORT_IN_QUERY)
    return f"?{kept}" if kept else ""


def _kept(headers: Iterable[tuple[bytes, bytes]], dropped: set[str]) -> Iterator[tuple[bytes, bytes]]:
    return ((name, value) for name, value in headers if name.decode("latin-1").lower() not in dropped)


def _location(headers: Iterable[tuple[bytes, bytes]], prefix: str, port: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the header with the address to go to, which leads through the proxy again if it is one of the program."""
    for name, value in headers:
        if name.lower() == b"location":
            try:
                parts = urlsplit(value.decode("latin-1"))
            except ValueError:
                continue
            own = parts.netloc in (f"127.0.0.1:{port}", f"localhost:{port}") or (
                not parts.netloc and parts.path[:1] == "/"
            )
            through = parts._replace(scheme="", netloc="", path=f"{prefix}/port/{port}{parts.path}").geturl()
            yield name, through.encode("latin-1") if own else value
