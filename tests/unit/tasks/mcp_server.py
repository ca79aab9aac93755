"""A server of tools that do what tools do, among it what they should not."""

import os
import time

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


if __name__ == "__main__":
    server.run()
