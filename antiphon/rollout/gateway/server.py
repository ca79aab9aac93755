"""The server: one port of this machine for all who have a key. Runs in the event loop of whoever opens it."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route

from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.types import AttemptId, PolicyVersion, Prompt, Sampling
from antiphon.rollout.gateway import anthropic, openai
from antiphon.rollout.gateway.chat import Refused, Reply, parse_object
from antiphon.rollout.gateway.served_model import ServedModel
from antiphon.rollout.gateway.sessions import Asked, Attempt, Captured, Session, UnrecordedClient

LARGEST = 64 << 20  # bytes of a request
PING_SECONDS = 10.0  # between signs of life while a reply is made; clients take a minute of silence for an end
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that none is closed under a request
SHUTDOWN_SECONDS = 2
GONE = 499  # a status that nobody receives
BACKLOG = 4096  # connections that may wait to be accepted: agents all start at once


class Gateway:
    """Serves a model to attempts and guests. Use as `async with Gateway(model) as gateway`."""

    def __init__(self, model: ServedModel, *, seed: int = 0, host: str = "127.0.0.1", port: int = 0) -> None:
        """`seed` is the run's. Port 0 takes any that is free."""
        self.model = model
        self.address = ""
        """Of the server, without a path."""
        self._seed = seed
        self._host, self._port = host, port
        self._sessions: dict[str, Session] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    # --- keys ----------------------------------------------------------------------------------------------------------

    def open(
        self,
        prompt: Prompt,
        attempt: AttemptId,
        started: PolicyVersion,
        sampling: Sampling,
        *,
        priority: int = 0,
        max_turns: int = 0,
    ) -> str:
        """A new key, for an attempt that begins now. Its tokens are drawn with `sampling`; it gets `max_turns` replies, or
        any number if that is 0."""
        session = Attempt(
            self.model,
            prompt,
            attempt,
            started,
            sampling,
            priority=priority,
            max_turns=max_turns,
            seed=self._seed,
        )
        return self._admit(secrets.token_urlsafe(24), session)

    def close(self, key: str) -> Captured:
        """End an attempt, and what it still waits for; returns what it came to."""
        session = self._sessions.pop(key)
        if not isinstance(session, Attempt):
            raise TypeError("only an attempt has come to something")
        session.end()
        return session.captured()

    def issue_key(self, token: str) -> str:
        """Let in who uses the model and has this token."""
        return self._admit(token, UnrecordedClient(self.model))

    @property
    def open_keys(self) -> int:
        """Attempts, and guests, that may ask."""
        return len(self._sessions)

    def _admit(self, key: str, session: Session) -> str:
        self._sessions[key] = session
        return key

    # --- serving -------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        listener = _listen(self._host, self._port)
        host, port = listener.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._server = _Server(
            uvicorn.Config(
                self.app(),
                lifespan="off",
                ws="none",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
                server_header=False,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="gateway")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            session.end()
        self._sessions.clear()
        assert self._server is not None and self._serving is not None
        self._server.should_exit = True
        await self._serving

    async def served(self) -> None:
        """Return when the server has ended."""
        assert self._serving is not None
        await self._serving

    def app(self) -> Starlette:
        """The application. The key is in the header, or in the path. Anthropic's clients add `/v1` to the address that they are
        given, OpenAI's do not: an address with `/v1` serves both."""
        routes: list[BaseRoute] = [
            Route("/v1/chat/completions", self._completions, methods=["POST"]),
            Route("/v1/messages", self._messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._models),
        ]
        routes = [*routes, Mount("/v1", routes=routes)]
        return Starlette(routes=[*routes, Mount("/attempts/{key}", routes=routes)])

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, openai)

    async def _messages(self, request: Request) -> Response:
        return await self._answer(request, anthropic)

    async def _models(self, request: Request) -> Response:
        dialect = anthropic if "anthropic-version" in request.headers else openai
        try:
            self._session(request)
        except Refused as error:
            return _failed(dialect, error)
        found = dialect.models(self.model.name)
        return JSONResponse(found["data"][0] if "model" in request.path_params else found)

    async def _count_tokens(self, request: Request) -> Response:
        try:
            session = self._session(request)
            chat = anthropic.read(parse_object(await _body(request)))
            return JSONResponse({"input_tokens": session.count(chat)})
        except Refused as error:
            return _failed(anthropic, error)

    async def _answer(self, request: Request, dialect: ModuleType) -> Response:
        try:
            session = self._session(request)
            asked = session.ask(dialect.read(parse_object(await _body(request))))
            if asked.chat.stream:
                return StreamingResponse(_events(session, asked, dialect), media_type="text/event-stream")
            replies = await _unless_gone(request, session, asked)
        except Refused as error:
            return _failed(dialect, error)
        pieces = self.model.pieces
        return JSONResponse(dialect.whole_reply(asked.chat, _identity(), len(asked.prompt), replies, pieces))

    def _session(self, request: Request) -> Session:
        kind, _, credentials = request.headers.get("authorization", "").partition(" ")
        keys = (
            request.path_params.get("key"),
            request.headers.get("x-api-key"),
            credentials.strip() if kind.lower() == "bearer" else None,
        )
        for key in keys:
            if key and (session := self._sessions.get(key)) is not None:
                return session
        raise Refused("the API key is unknown, or its attempt has ended", 401, "invalid_api_key")


async def _unless_gone(request: Request, session: Session, asked: Asked) -> list[Reply]:
    """The replies; nothing is made for a client that has left."""
    answer = asyncio.create_task(session.answer(asked))
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return _result(answer)
    finally:
        gone.cancel()
        answer.cancel()
    raise Refused("the client has left", GONE)


async def _events(session: Session, asked: Asked, dialect: ModuleType) -> AsyncIterator[bytes]:
    """The reply as a stream, with signs of life while there is nothing to tell."""
    stream = dialect.Stream(asked.chat, _identity(), len(asked.prompt), session.model.pieces)
    told: asyncio.Queue[str | None] = asyncio.Queue()
    said = ""
    answer = asyncio.create_task(session.answer(asked, told.put_nowait))
    answer.add_done_callback(lambda _: told.put_nowait(None))
    try:
        for event in stream.begin():
            yield event
        while (piece := await _next(told)) is not None:
            said += piece
            for event in stream.text(piece) if piece else [stream.ping]:
                yield event
        for event in stream.end(_result(answer), said):
            yield event
    except Refused as error:
        for event in stream.failed(error):
            yield event
    finally:
        answer.cancel()


async def _next(told: "asyncio.Queue[str | None]") -> str | None:
    """The next piece of text; an empty one if it is long in coming, None at the end."""
    try:
        async with asyncio.timeout(PING_SECONDS):
            return await told.get()
    except TimeoutError:
        return ""


def _result(answer: "asyncio.Task[list[Reply]]") -> list[Reply]:
    """What was answered; the errors of engines, and the end of the attempt, as what the client is told."""
    if answer.cancelled():
        raise Refused("the attempt has ended", 401, "invalid_api_key")
    try:
        return answer.result()
    except AntiphonError as error:
        raise Refused(f"the model cannot answer: {error}", 503, "engine_error") from error


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    try:
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > LARGEST:
                raise Refused(f"the request is larger than {LARGEST} bytes", 413)
    except ClientDisconnect as error:
        raise Refused("the client has left", GONE) from error
    return b"".join(parts)


def _failed(dialect: ModuleType, error: Refused) -> Response:
    return JSONResponse(dialect.failure(error), status_code=error.status)


def _identity() -> str:
    return f"reply-{secrets.token_hex(12)}"


class _Server(uvicorn.Server):
    """A server that leaves signals to the program that it is a part of."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"host: {host!r}, port: {port}: cannot listen there: {error.strerror}") from error
    return listener
