"""A server of tools that do what tools do, among it what they should not."""

import asyncio
import os
import time
from pathlib import Path

from mcp.server import MCPServer

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def process() -> int:
    """The number of this process."""
    return os.getpid()


@server.tool()
def fail() -> str:
    """Raise."""
    raise ValueError("out of paper")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def hang() -> str:
    """Never return."""
    while True:
        time.sleep(1)


@server.tool()
async def forever() -> str:
    """Never return, and let others be called."""
    await asyncio.Event().wait()


@server.tool()
async def rendezvous(begun: str, end: str) -> int:
    """Open one named pipe, then wait for what comes through another; return the number of this process."""
    await asyncio.to_thread(Path(begun).write_text, "begun")
    await asyncio.to_thread(Path(end).read_text)
    return os.getpid()


if __name__ == "__main__":
    server.run()
