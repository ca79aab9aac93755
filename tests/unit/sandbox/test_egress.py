"""How long a connection through the proxy of a sandbox may be silent."""

import asyncio

import pytest

from antiphon.sandbox.sessions import egress
from antiphon.sandbox.sessions.egress import Egress

IDLE = 0.4


async def fetch(tmp_path, pauses):
    """Return what comes through a tunnel from a server that sends a byte after each pause, while the client is silent."""

    async def serve(reader, writer):
        try:
            for pause in pauses:
                await asyncio.sleep(pause)
                writer.write(b"x")
        finally:
            writer.close()
            served.set()

    served = asyncio.Event()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        here = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        proxy = Egress([here])
        await proxy.start(tmp_path / "proxy")
        reader, writer = await asyncio.open_unix_connection(tmp_path / "proxy")
        writer.write(f"CONNECT {here} HTTP/1.1\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        content = await reader.read()
        writer.close()
        await proxy.close()
        await served.wait()
        await asyncio.sleep(0)  # in which the transport of the server is closed
        return content


@pytest.mark.parametrize(("pauses", "content"), [([IDLE / 2] * 5, b"xxxxx"), ([0.0, 4 * IDLE], b"x")])
def test_a_connection_ends_once_both_ways_are_silent(tmp_path, monkeypatch, pauses, content):
    monkeypatch.setattr(egress, "IDLE_SECONDS", IDLE)
    assert asyncio.run(asyncio.wait_for(fetch(tmp_path, pauses), 30)) == content
