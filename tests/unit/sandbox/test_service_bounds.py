"""What is counted of a request before it is read, against Python's own reader of JSON and its codecs."""

import asyncio
import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from antiphon.sandbox.service import app, bounds, texts
from antiphon.sandbox.service.bounds import BodyBounds, run_while_connected
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.http_errors import RefusedError

JSON = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(alphabet='"\\[]{},:aé\n\ud800', max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text('"\\,[a', max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def members(value) -> int:
    """Separators and openings of lists and objects: of n members, n, and 1 of none."""
    if not isinstance(value, list | dict):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return max(1, len(inner)) + sum(map(members, inner))


def depth(value) -> int:
    if not isinstance(value, list | dict):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


def count(content: bytes, size: int, content_type: bytes = b"application/json", largest: int = 1 << 20) -> int:
    """The status that a body gets which arrives in pieces of a size; 200 if it is let through whole."""
    pieces = [content[at : at + size] for at in range(0, len(content), size)]

    async def take() -> int:
        async def receive():
            return {"type": "http.request", "body": pieces.pop(0)}

        wrapped, got = BodyBounds(content_type, largest).wrap(receive), b""
        try:
            while pieces:
                got += (await wrapped())["body"]
        except HTTPException as error:
            return error.status_code
        assert got == content
        return 200

    return asyncio.run(take())


@given(JSON, st.booleans(), st.integers(1, 9), st.integers(0, 12), st.integers(0, 4))
def test_bodies_are_counted_as_they_arrive(value, ascii_only, size, most, deepest):
    content = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "MOST_VALUES", most)
        patch.setattr(bounds, "DEEPEST", deepest)
        expected = 413 if members(value) > most or depth(value) > deepest else 200
        assert count(content, size) == expected


@pytest.mark.parametrize(
    ("content_type", "content", "status"),
    [
        (b"application/json", b'"' + b"," * 100_000 + b'"', 200),  # a text
        (b"", b"[" * 100, 413),
        (b"text/plain", b"," * 100_000, 413),
        (b"multipart/form-data; boundary=x", b"," * 100_000, 200),  # a file
        (b"Multipart/Form-Data", b"," * 2_000_000, 413),  # and a large one
        (b"application/x-www-form-urlencoded", b"a=b", 415),
        (b"application/json", '{"a": "∀"}'.encode("utf-16"), 400),
    ],
)
def test_bounds_by_content_type(content_type, content, status):
    assert count(content, 1 << 16, content_type) == status


ENCODINGS = [
    "utf-8",
    "UTF_16",
    "utf-32",
    "latin-1",
    "cp1252",
    "ascii",
    "shift_jis",
    "utf-8-sig",
    "gb18030",
    "hz",
    "koi8_r",
]


@given(
    st.binary(max_size=300),
    st.sampled_from(
        ["utf-8", "UTF_16", "latin-1", "cp1252", "ascii", "shift_jis", "utf-8-sig", "gb18030", "hz", "utf-32", "koi8_r"]
    ),
    st.sampled_from(texts.ERRORS),
    st.integers(1, 7),
)
def test_files_are_decoded_as_in_one_piece(content, encoding, errors, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "CHUNK", size)
        try:
            expected = content.decode(encoding, errors)
        except ValueError:
            with pytest.raises(RefusedError):
                asyncio.run(texts.text_as_json(content, encoding, errors))
        else:
            parts = asyncio.run(texts.text_as_json(content, encoding, errors))
            assert json.loads(b"".join(parts)) == expected


def test_others_have_their_turn_while_a_file_is_decoded():
    async def run():
        turns = 0

        async def take_turns():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(take_turns())
        await texts.text_as_json(b"\xff" * (100 * texts.CHUNK), "ascii", "backslashreplace")
        other.cancel()
        assert turns >= 100

    asyncio.run(run())


def test_work_ends_when_its_client_goes():
    async def run():
        gone, cancelled = asyncio.Event(), asyncio.Event()

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def work():
            gone.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        with pytest.raises(RefusedError):
            await run_while_connected(receive, work())
        assert cancelled.is_set()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_work_is_done_while_its_client_waits():
    async def run():
        async def work():
            return 3

        assert await run_while_connected(asyncio.Event().wait, work()) == 3

    asyncio.run(asyncio.wait_for(run(), 30))


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SLOW = GET.replace(b"/ ", b"/slow ")
HALVES = [  # and how many answers come before the connection is closed
    *((b"", 0), (b"GET /", 0), (b"GET / HTTP/1.1\r\nHost: x\r\n", 0), (SLOW[:-2] + b"Content-Length: 9\r\n\r\n{", 0)),
    *((GET + b"GET", 1), (GET + b"\r\n", 1), (SLOW + GET[:-2], 1), (GET[:-2] + b"Content-Length: 9\r\n\r\n{", 1)),
]


async def answer(scope, receive, send):
    """An application that answers without reading, and for `/slow` only after longer than a request may take."""
    if scope["path"] == "/slow":
        await asyncio.sleep(1.0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"well"})


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the connection is closed or reset."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := await reader.read(1 << 16):
            found += part
    return found


def exchange(*sent: bytes) -> bytes:
    """Send pieces to a server whose requests have 0.4 s to arrive, with a pause after each; what comes until it closes.

    A piece that arrives after that has the kernel reset the connection, perhaps before its end was read.
    """

    async def run():
        config = ServiceConfig(port=0, request_seconds=0.4)
        server = app._server(answer, config)
        with app._listen(config) as listener:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            received = asyncio.create_task(read_all(reader))
            for piece in sent:
                writer.write(piece)
                await asyncio.wait([received], timeout=0.05)
            found = await asyncio.wait_for(received, 30)
            writer.close()
            server.should_exit = True
            await serving
            return found

    return asyncio.run(run())


@pytest.mark.parametrize(("sent", "answers"), HALVES)
def test_half_requests_are_closed(sent, answers):
    assert exchange(sent).count(b"well") == answers


def test_requests_that_trickle_in_are_closed():
    assert exchange(*[b"GET / HTTP/1.1\r\n", *[b"A: b\r\n"] * 40, b"\r\n"]) == b""


def test_whole_requests_are_answered_late():
    assert exchange(SLOW.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")).endswith(b"well")
