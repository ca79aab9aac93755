"""HTTP bodies and answers: reading requests, streaming replies, and noticing clients that disconnect."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from types import ModuleType

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from antiphon.core.errors import AntiphonError
from antiphon.rollout.gateway.chat import ApiError, Reply
from antiphon.rollout.gateway.sessions import PreparedRequest, Session

MAX_BODY = 64 << 20  # bytes of a request
PING_SECONDS = 10.0  # between signs of life while a reply is generated; clients give up after a minute of silence
DISCONNECTED = 499  # a status that nobody receives


async def answer_unless_disconnected(request: Request, session: Session, prepared: PreparedRequest) -> list[Reply]:
    """Generate the replies; stop if the client disconnects.

    Raises:
        ApiError: If the request fails or the client has disconnected.
    """
    answer = asyncio.create_task(session.answer(prepared))
    disconnected = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait([answer, disconnected], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return _result(answer)
    finally:
        disconnected.cancel()
        answer.cancel()
    raise ApiError("the client has left", DISCONNECTED)


async def stream_events(session: Session, prepared: PreparedRequest, protocol: ModuleType) -> AsyncIterator[bytes]:
    """Yield the reply as a stream of events, with pings while there is no text."""
    stream = protocol.Stream(prepared.chat, new_reply_id(), len(prepared.prompt), session.model.token_texts)
    texts: asyncio.Queue[str | None] = asyncio.Queue()
    sent = ""
    answer = asyncio.create_task(session.answer(prepared, texts.put_nowait))
    answer.add_done_callback(lambda _: texts.put_nowait(None))
    try:
        for event in stream.begin():
            yield event
        while (piece := await _next(texts)) is not None:
            sent += piece
            for event in stream.text(piece) if piece else [stream.ping]:
                yield event
        for event in stream.end(_result(answer), sent):
            yield event
    except ApiError as error:
        for event in stream.failed(error):
            yield event
    finally:
        answer.cancel()


async def _next(texts: "asyncio.Queue[str | None]") -> str | None:
    """Return the next piece of text; an empty one after `PING_SECONDS`, None at the end."""
    try:
        async with asyncio.timeout(PING_SECONDS):
            return await texts.get()
    except TimeoutError:
        return ""


def _result(answer: "asyncio.Task[list[Reply]]") -> list[Reply]:
    """Return the replies; raise errors of engines, and the end of the attempt, as `ApiError`."""
    if answer.cancelled():
        raise ApiError("the attempt has ended", 401, "invalid_api_key")
    try:
        return answer.result()
    except AntiphonError as error:
        raise ApiError(f"the model cannot answer: {error}", 503, "engine_error") from error


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request) -> bytes:
    """Read the body of a request; raise `ApiError` if it is too large or the client has disconnected."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > MAX_BODY:
                raise ApiError(f"the request is larger than {MAX_BODY} bytes", 413)
    except ClientDisconnect as error:
        raise ApiError("the client has left", DISCONNECTED) from error
    return b"".join(parts)


def error_response(protocol: ModuleType, error: ApiError) -> Response:
    """Return an error as the protocol writes it."""
    return JSONResponse(protocol.error_body(error), status_code=error.status)


def new_reply_id() -> str:
    """Return a random id for a reply."""
    return f"reply-{secrets.token_hex(12)}"
