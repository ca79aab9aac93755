"""The server: one port for everybody who has a key. It runs in the event loop that opens it."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route

from antiphon.core.types import FloatArray, IntArray
from antiphon.rollout.attempt import AttemptInputs
from antiphon.rollout.gateway import anthropic, completions, openai
from antiphon.rollout.gateway.attempt_session import AttemptSession, CapturedAttempt
from antiphon.rollout.gateway.chat import ApiError, Reply, parse_object
from antiphon.rollout.gateway.listener import Server, listen
from antiphon.rollout.gateway.responses import (
    answer_unless_disconnected,
    error_response,
    new_reply_id,
    read_body,
    stream_events,
)
from antiphon.rollout.gateway.served_model import ServedModel
from antiphon.rollout.gateway.sessions import PreparedRequest, Session
from antiphon.rollout.gateway.unrecorded_client import UnrecordedClient

KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that none is closed under a request
SHUTDOWN_SECONDS = 2


class Answer(NamedTuple):
    """The answer to a request of OpenAI's protocol, with its tokens."""

    response: Mapping[str, Any]
    """The response of OpenAI's protocol."""
    prompt: IntArray
    """Tokens of the prompt [P]."""
    replies: tuple[tuple[IntArray, FloatArray], ...]
    """Sampled tokens of each choice and their log-probs, [C] each."""


class Gateway:
    """Serves a model to attempts and to other clients. Use as `async with Gateway(model) as gateway`."""

    def __init__(self, model: ServedModel, *, seed: int = 0, host: str = "127.0.0.1", port: int = 0) -> None:
        """Create a gateway.

        Args:
            model: The model.
            seed: Seed of the run.
            host: Address to listen on.
            port: Port to listen on; 0 takes a free one.
        """
        self.model = model
        self.address = ""
        """Address of the server, without a path."""
        self._seed = seed
        self._host, self._port = host, port
        self._sessions: dict[str, Session] = {}
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    # --- keys ----------------------------------------------------------------------------------------------------------

    def open_attempt(self, inputs: AttemptInputs, *, max_turns: int = 0) -> str:
        """Issue a key for an attempt that begins now.

        Args:
            inputs: Inputs of the attempt.
            max_turns: Most replies; 0 means no limit.
        """
        session = AttemptSession(self.model, inputs, max_turns=max_turns, seed=self._seed)
        return self._admit(secrets.token_urlsafe(24), session)

    def close_attempt(self, key: str) -> CapturedAttempt:
        """End an attempt and its requests; return what was recorded."""
        session = self._sessions.pop(key)
        if not isinstance(session, AttemptSession):
            raise TypeError("only the session of an attempt is recorded")
        session.end()
        return session.captured()

    def issue_key(self, token: str) -> str:
        """Accept a token as the key of a client that is not recorded."""
        return self._admit(token, UnrecordedClient(self.model))

    async def answer(self, key: str, body: Mapping[str, Any]) -> Answer:
        """Answer a request of OpenAI's protocol that comes from this process or one of its workers.

        Args:
            key: A key that was issued.
            body: Body of the request: of a text completion if it has a `prompt`, else of a chat completion.

        Raises:
            ApiError: The key is unknown, or the request cannot be answered.
        """
        session, protocol = self._find_session(key), completions if "prompt" in body else openai
        prepared = _prepare(session, protocol, body)
        replies = await session.answer(prepared)
        sampled = tuple((reply.completion.tokens, reply.completion.logprobs) for reply in replies)
        return Answer(self._response(protocol, prepared, replies), prepared.prompt, sampled)

    @property
    def open_keys(self) -> int:
        """Number of keys that are accepted now."""
        return len(self._sessions)

    def _admit(self, key: str, session: Session) -> str:
        self._sessions[key] = session
        return key

    # --- serving -------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        listener = listen(self._host, self._port)
        host, port = listener.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._server = Server(
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

    def app(self) -> Starlette:
        """Return the application.

        The key is in the header or in the path. Anthropic's clients add `/v1` to the address that they are given, OpenAI's do
        not: an address that ends in `/v1` serves both.
        """
        endpoints = self._endpoints()
        routes: list[BaseRoute] = [*endpoints, Mount("/v1", routes=endpoints)]
        return Starlette(routes=[*routes, Mount("/attempts/{key}", routes=routes)])

    def _endpoints(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self._completions, methods=["POST"]),
            Route("/v1/completions", self._text_completions, methods=["POST"]),
            Route("/v1/messages", self._messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._models),
        ]

    def describe(self, model: str) -> str:
        """Return what clients need: the base URL, the model's name and the endpoints."""
        paths = ", ".join(route.path for route in self._endpoints())
        return f"{self.address}/v1\nmodel: {model} (a request may name any)\nendpoints: {paths}"

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, openai)

    async def _text_completions(self, request: Request) -> Response:
        return await self._answer(request, completions)

    async def _messages(self, request: Request) -> Response:
        return await self._answer(request, anthropic)

    async def _models(self, request: Request) -> Response:
        protocol = anthropic if "anthropic-version" in request.headers else openai
        try:
            self._session(request)
        except ApiError as error:
            return error_response(protocol, error)
        found = protocol.list_models(self.model.name)
        return JSONResponse(found["data"][0] if "model" in request.path_params else found)

    async def _count_tokens(self, request: Request) -> Response:
        try:
            session = self._session(request)
            chat = anthropic.parse_request(parse_object(await read_body(request)))
            return JSONResponse({"input_tokens": session.count(chat)})
        except ApiError as error:
            return error_response(anthropic, error)

    async def _answer(self, request: Request, protocol: ModuleType) -> Response:
        try:
            session = self._session(request)
            prepared = _prepare(session, protocol, parse_object(await read_body(request)))
            if prepared.chat.stream:
                return StreamingResponse(stream_events(session, prepared, protocol), media_type="text/event-stream")
            replies = await answer_unless_disconnected(request, session, prepared)
        except ApiError as error:
            return error_response(protocol, error)
        return JSONResponse(self._response(protocol, prepared, replies))

    def _response(self, protocol: ModuleType, prepared: PreparedRequest, replies: Sequence[Reply]) -> Mapping[str, Any]:
        """Return an answer in the form of a protocol."""
        token_texts = self.model.token_texts
        response: Mapping[str, Any] = protocol.completion_response(
            prepared.chat, new_reply_id(), len(prepared.prompt), replies, token_texts
        )
        return response

    def _session(self, request: Request) -> Session:
        kind, _, credentials = request.headers.get("authorization", "").partition(" ")
        keys = (
            request.path_params.get("key"),
            request.headers.get("x-api-key"),
            credentials.strip() if kind.lower() == "bearer" else None,
        )
        return self._find_session(*filter(None, keys))

    def _find_session(self, *keys: str) -> Session:
        for key in keys:
            if (session := self._sessions.get(key)) is not None:
                return session
        raise ApiError("the API key is unknown, or its attempt has ended", 401, "invalid_api_key")


def _prepare(session: Session, protocol: ModuleType, body: Mapping[str, Any]) -> PreparedRequest:
    """Parse and check a request."""
    prepare = session.prepare_completion if protocol is completions else session.prepare
    return prepare(protocol.parse_request(body))
