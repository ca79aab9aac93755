"""The HTTP application of the sandbox service, and the server that runs it."""

import asyncio
import base64
import binascii
import hmac
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from antiphon.core.errors import ConfigError
from antiphon.sandbox.remote import PATH, ProgramRequest
from antiphon.sandbox.service import rock
from antiphon.sandbox.service.bounded_websockets import BoundedServer
from antiphon.sandbox.service.bounds import (
    LONGEST_MESSAGE,
    BodyBounds,
    TimedProtocol,
    describe_problems,
    run_while_connected,
)
from antiphon.sandbox.service.commands import Commands
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.environments import Environments, Spawn
from antiphon.sandbox.service.holdings import HOLDINGS_PATH, report_holdings
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.manager import Sandboxes
from antiphon.sandbox.service.metrics import Metrics
from antiphon.sandbox.service.page import SECURITY_HEADERS, render_page
from antiphon.sandbox.service.ports import Connect, Ports
from antiphon.sandbox.service.programs import Programs
from antiphon.sandbox.service.reverse_proxy import ReverseProxy
from antiphon.sandbox.service.routes import Answer, EnvironmentRoutes, SandboxRoutes
from antiphon.sandbox.service.upstream_ports import ServiceAddress
from antiphon.sandbox.service.upstreams import Upstream, Upstreams, connect_to_hosts
from antiphon.sandbox.service.workers import Workers

SHUTDOWN_SECONDS = 2  # for requests under way to end by themselves
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that none is closed during a request
CREDENTIALS = (b"authorization", b"xrl-authorization")  # headers, of which either may carry the token
SLACK = 1 << 20  # bytes of a request beyond the file that it uploads
EnvironmentSource = tuple[Sequence[str], Spawn]  # names, and how to start the process of one


def create_app(sandboxes: Sandboxes, environments: Environments, programs: Programs, token: str) -> FastAPI:
    """Return the application. Serve it only while its arguments are entered."""
    app = FastAPI(title="Antiphon sandboxes", docs_url=None, redoc_url=None)
    commands = Commands(sandboxes)
    metrics = sandboxes.metrics
    app.include_router(SandboxRoutes(sandboxes, commands).router())
    app.include_router(EnvironmentRoutes(environments).router())

    @app.post(PATH)
    async def python(request: Request, body: ProgramRequest) -> Answer:
        return Answer(asdict(await run_while_connected(request.receive, programs.run(body))))

    @app.get(HOLDINGS_PATH)
    async def holdings() -> Answer:
        return Answer(report_holdings(sandboxes, environments).model_dump(mode="json"))

    @app.get("/metrics")
    async def text() -> PlainTextResponse:
        now = {
            "antiphon_sandbox_commands_in_flight": commands.busy,
            "antiphon_sandbox_programs_in_flight": programs.busy,
            "antiphon_environments": len(environments.all()),
        }
        return PlainTextResponse(metrics.text({**sandboxes.gauges(), **{name: {"": n} for name, n in now.items()}}))

    @app.get("/")
    async def home() -> HTMLResponse:
        return HTMLResponse(
            render_page(sandboxes, environments, commands.busy).encode("utf-8", "replace"), headers=SECURITY_HEADERS
        )

    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> Answer:
        metrics.count("antiphon_requests_refused", reason=error.reason.value)
        status, code = rock.STATUS_CODES[error.reason]
        return Answer(rock.failure(str(error)[:LONGEST_MESSAGE], code), status_code=status)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Answer:
        metrics.count("antiphon_requests_refused", reason=Reason.INPUT.value)
        return Answer(rock.failure(describe_problems(error.errors()), rock.BAD_REQUEST), status_code=400)

    @app.exception_handler(StarletteHTTPException)
    async def other(request: Request, error: StarletteHTTPException) -> Answer:
        metrics.count("antiphon_requests_refused", reason=Reason.INPUT.value)
        return Answer(rock.failure(str(error.detail), rock.BAD_REQUEST), error.status_code, error.headers)

    largest = _max_request_bytes(sandboxes.config)
    app.add_middleware(AuthMiddleware, token=token, largest=largest, connect=commands.connect)
    return app


class AuthMiddleware:
    """Admits requests that carry the token, do not come from another site's page, and stay within bounds."""

    def __init__(self, app: Any, token: str, largest: int, connect: Connect) -> None:
        """`connect`: connects to a port of a sandbox of the application."""
        self._app = app
        self._ports = Ports(connect, largest)
        self._token = token.encode()
        self._largest = largest

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        headers = dict(reversed(scope["headers"]))  # the first of several counts, as for FastAPI
        if not any(self._is_token(headers.get(name, b"")) for name in CREDENTIALS):
            answer = Answer(rock.failure("the token is missing or wrong", rock.BAD_REQUEST), status_code=401)
            answer.headers["WWW-Authenticate"] = 'Basic realm="Antiphon sandboxes"'
            await answer(scope, receive, send)
        elif scope.get("method") != "GET" and _is_from_other_origin(headers):
            await Answer(rock.failure("requests from other sites are not allowed", rock.BAD_REQUEST), status_code=403)(
                scope, receive, send
            )
        elif self._ports.serves(scope):
            passed = [(name, value) for name, value in scope["headers"] if not self._is_credential(name, value)]
            await self._ports({**scope, "headers": passed}, receive, send)
        else:
            bounds = BodyBounds(headers.get(b"content-type", b""), self._largest)
            await self._app(scope, bounds.wrap(receive), send)

    def _is_credential(self, name: bytes, value: bytes) -> bool:
        return name in CREDENTIALS and self._is_token(value)

    def _is_token(self, credentials: bytes) -> bool:
        kind, _, value = credentials.partition(b" ")
        if kind.lower() == b"basic":
            try:
                value = base64.b64decode(value, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif kind.lower() != b"bearer":
            return False
        return hmac.compare_digest(value.strip(), self._token)


def _is_from_other_origin(headers: Mapping[bytes, bytes]) -> bool:
    """Return True if a browser says that a page of another origin sends the request, also one of another port of this machine.

    A browser keeps Basic credentials and sends them with requests of any page. Programs send neither header.
    """
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in (b"same-origin", b"none")
    origin = headers.get(b"origin")
    return origin is not None and urlsplit(origin).netloc != headers.get(b"host", b"")


def serve(
    config: ServiceConfig,
    token: str,
    names: Sequence[str],
    spawn: Spawn,
    announce: Callable[[str], None],
    host_tokens: Sequence[str] = (),
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        config: Address, quotas and number of workers.
        token: Clients must send it.
        names: Environments that clients may make.
        spawn: Starts the process of an environment; with several workers, a function of a module.
        announce: Called with the address once the service is ready.
        host_tokens: The token of each of `config.hosts`.
    """
    with _listen(config) as listener:
        host, port = listener.getsockname()[:2]
        ready = partial(announce, f"http://{f'[{host}]' if ':' in host else host}:{port}")
        if config.hosts:
            _run(_serve_front(config, token, connect_to_hosts(config, host_tokens), listener, ready))
        elif config.workers == 1:
            _run(_serve(config, token, (names, spawn), listener, ready))
        else:
            _run(_serve_workers(config, token, (names, spawn), listener, ready))


def serve_as_worker(token: str, source: EnvironmentSource, config: ServiceConfig, listener: socket.socket) -> None:
    """Serve as one of several workers."""
    _run(_serve(config, token, source, listener, lambda: None))


def _run(serving: Coroutine[Any, Any, None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal that ended it again; the cleanup after it must still run
        signal.signal(number, lambda *_: None)
    asyncio.run(serving)


async def _serve(
    config: ServiceConfig, token: str, source: EnvironmentSource, listener: socket.socket, ready: Callable[[], None]
) -> None:
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        sandboxes = await stack.enter_async_context(Sandboxes(config, metrics))
        environments = await stack.enter_async_context(Environments(config, metrics, *source))
        programs = await stack.enter_async_context(Programs(config, metrics))
        server = _server(create_app(sandboxes, environments, programs, token), config)
        ready()
        await server.serve(sockets=[listener])


async def _serve_workers(
    config: ServiceConfig, token: str, source: EnvironmentSource, listener: socket.socket, ready: Callable[[], None]
) -> None:
    async with Workers(config, partial(serve_as_worker, token, source)) as workers:
        members = [
            Upstream(
                f"worker {number}", client, ServiceAddress(url="http://worker", socket=at), token, Reason.LOST, config
            )
            for number, (client, at) in enumerate(zip(workers.clients, workers.sockets, strict=True))
        ]
        await _serve_front(config, token, members, listener, ready)


async def _serve_front(
    config: ServiceConfig, token: str, members: Sequence[Upstream], listener: socket.socket, ready: Callable[[], None]
) -> None:
    async with Upstreams(members, config) as upstreams:
        app = AuthMiddleware(ReverseProxy(upstreams), token, _max_request_bytes(config), upstreams.connect)
        server = _server(app, config)
        ready()
        await server.serve(sockets=[listener])


def _is_of_interest(record: logging.LogRecord) -> bool:
    """Return False for what uvicorn 0.54 says of websockets that are refused, and of what a program or a client does wrong."""
    return record.getMessage() not in (
        "ASGI callable returned without completing handshake.",
        "ASGI callable returned without completing response.",
        "Invalid UTF-8 sequence received from client.",
    )


def _server(app: Any, config: ServiceConfig) -> uvicorn.Server:
    logging.getLogger("uvicorn.error").addFilter(_is_of_interest)
    protocol: Any = partial(TimedProtocol, seconds=config.request_seconds)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol,
            lifespan="off",
            ws=BoundedServer,
            ws_per_message_deflate=False,  # a small message could become a large one
            ws_ping_timeout=None,  # a client that waits for its program to read is no dead one; TCP finds those
            log_level="warning",
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            server_header=False,
        )
    )


def _max_request_bytes(config: ServiceConfig) -> int:
    """Return the maximum size of a request in bytes."""
    return (config.upload << 20) + SLACK


def _listen(config: ServiceConfig) -> socket.socket:
    """Return a listening socket. Clients can connect from now on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        for option in (socket.SO_REUSEADDR, socket.SO_KEEPALIVE):  # the second is that of its connections, too
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        message = f"{config.port} of host {config.host!r} cannot be listened to: {error.strerror}"
        raise ConfigError(message, key="port", value=config.port) from error
    return listener
