"""Bounds on every request before it is parsed: time to arrive, size, and number and depth of values."""

import asyncio
import re
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import h11
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from antiphon.sandbox.service.http_errors import Reason, RefusedError

T = TypeVar("T")

MOST_VALUES = 10_000  # members of all lists and objects of a JSON body
DEEPEST = 32  # nesting of lists and objects
LONGEST_MESSAGE = 2000  # characters of an error message, which does not repeat the request
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")


class TimedProtocol(H11Protocol):
    """The HTTP protocol of uvicorn with a time limit for a request to arrive; uvicorn itself waits for ever.

    The time runs from the connection, or from the first byte after a response, until the last byte of the body.
    """

    def __init__(self, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = seconds
        self._upgraded = False
        self._arriving: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the timer of the first request."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_watch()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what has arrived, and start or stop the timer."""
        super().handle_events()
        self._watch()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Stop the timer: the request has arrived, and the connection is another protocol's now."""
        super().handle_websocket_upgrade(event)
        self._upgraded = True

    def _watch(self) -> None:
        state = h11.DONE if self._upgraded else self.conn.their_state
        # Between two requests uvicorn's own timer runs, until something arrives.
        has_begun = self.timeout_keep_alive_task is None or bool(self.conn.trailing_data[0])
        if state is h11.SEND_BODY or (state is h11.IDLE and has_begun):
            if self._arriving is None:
                self._arriving = self.loop.call_later(self._seconds, self.transport.abort)
        else:
            self._stop_watch()

    def _stop_watch(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None


class BodyBounds:
    """Counts the bytes and JSON values of a body as it arrives, and raises `HTTPException` beyond a bound."""

    def __init__(self, content_type: bytes, largest: int) -> None:
        """Prepare for a body.

        Args:
            content_type: A body that is not a form counts as JSON.
            largest: Maximum size in bytes.
        """
        kind = content_type.partition(b";")[0].strip().lower()
        self._is_json = kind != b"multipart/form-data"
        self._is_form = kind == b"application/x-www-form-urlencoded"
        self._largest = largest
        self._size = self._values = self._depth = 0
        self._quoted = self._escaped = False

    def wrap(self, receive: Receive) -> Receive:
        """Return an ASGI `receive` that counts what it passes on."""

        async def counted() -> Message:
            message = await receive()
            if content := message.get("body", b""):
                self._count(content)
            return message

        return counted

    def _count(self, content: bytes) -> None:
        self._size += len(content)
        if self._size > self._largest:
            raise HTTPException(413, f"the request is larger than {self._largest} bytes")
        if self._is_form:
            raise HTTPException(415, "the body must be JSON, or for an upload multipart/form-data")
        if self._is_json:
            self._count_values(content)

    def _count_values(self, content: bytes) -> None:
        if b"\0" in content:  # not UTF-8; in UTF-16 a quotation mark cannot be told from half a character
            raise HTTPException(400, "the body must be JSON in UTF-8")
        if self._escaped:
            content, self._escaped = content[1:], False
        content = _ESCAPE.sub(b"", content)
        if content.endswith(b"\\"):
            content, self._escaped = content[:-1], True
        parts = content.split(b'"')
        outside = b"".join(parts[self._quoted :: 2])
        self._quoted ^= len(parts) % 2 == 0
        self._values += sum(map(outside.count, (b",", b"[", b"{")))
        if self._values > MOST_VALUES:
            raise HTTPException(413, f"the body has more than {MOST_VALUES} values")
        for bracket in _BRACKETS.findall(outside):
            self._depth += 1 if bracket in b"[{" else -1
            if self._depth > DEEPEST:
                raise HTTPException(413, f"the body has more than {DEEPEST} nested lists or objects")


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it and raise `RefusedError` if the client disconnects.

    Args:
        receive: The ASGI `receive` of a request whose body has been read.
        work: The coroutine to run.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RefusedError(Reason.LOST, "the client has disconnected")
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait([task])


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def describe_problems(problems: Sequence[Any]) -> str:
    """Return a short description of pydantic's validation errors that does not repeat the request."""
    lines = [f"{'.'.join(str(part)[:64] for part in item['loc'])}: {item['msg'][:200]}" for item in problems[:10]]
    return "; ".join(lines + [f"and {len(problems) - 10} more"] * (len(problems) > 10))
