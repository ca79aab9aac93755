"""What is read from a server's stream."""

import asyncio

import httpx

from antiphon.engines.server_connection import ServerConnection


def test_lines_end_at_line_feeds_alone():
    """JSON may hold U+2028, U+2029 and U+0085 in its strings as they are, and a piece may end within a character."""
    lines = ['data: {"text": "a\u2028b\u2029c\u0085d"}', "", "data: {}\r", "the end"]
    whole = "\n".join(lines).encode()

    class InPieces(httpx.AsyncByteStream):
        def __init__(self, size):
            self.size = size

        async def __aiter__(self):
            for start in range(0, len(whole), self.size):
                yield whole[start : start + self.size]

    async def read(size):
        connection = ServerConnection("http://server", "", lambda death: None)
        transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=InPieces(size)))
        connection._client = httpx.AsyncClient(base_url="http://server", transport=transport)
        async with connection._client, connection.stream_lines("/generate", {}) as found:
            return [line async for line in found]

    for size in (1, 7, len(whole)):
        assert asyncio.run(read(size)) == lines
