"""Tools of MCP servers, which are programs that speak over their standard input and output. Needs the package `mcp`, of the
extra `envs`.

A server is started when it is first needed and serves all episodes of the process, so what its tools do should not depend on
who called before. It lives in a thread with an event loop of its own, for it outlasts the loops that episodes run in. Where one
does not answer, another takes its place for all calls that follow; those that it is at may still end well.
"""

import asyncio
import atexit
import contextlib
import functools
import operator
import shlex
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from antiphon.core.errors import StallError, WorkerDied
from antiphon.tasks.environments.extras import import_optional
from antiphon.tasks.environments.toolbox import Tool, ToolError

PATIENCE = 60.0  # seconds that a server may take to start
_GRACE = 5.0  # seconds that it may take to end
_CLOSED = -32000  # the code of an error that says that the connection is


class McpServer:
    """One running server. A call that it does not answer in time, or ends during, raises, and it is not asked again: it ends
    when nobody waits for it any more."""

    def __init__(self, command: Sequence[str]) -> None:
        self._mcp = import_optional("mcp", "an MCP server")
        self._command = tuple(command)
        self._client: Future[Any] = Future()
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._stopped = self._retired = False
        self._asked = 0  # calls that wait for it
        self._thread = threading.Thread(target=self._run, name=f"mcp {command[0]}", daemon=True)
        self._thread.start()

    async def tools(self, seconds: float) -> list[Tool]:
        """All its tools; each may take so many seconds."""
        page = await self._ask(lambda client: client.list_tools(), PATIENCE)
        listed = list(page.tools)
        while page.next_cursor:
            page = await self._ask(operator.methodcaller("list_tools", cursor=page.next_cursor), PATIENCE)
            listed += page.tools
        return [
            Tool(
                name=tool.name,
                description=tool.description or "",
                parameters=tool.input_schema,
                call=functools.partial(_call, self._command, tool.name, seconds),
            )
            for tool in listed
        ]

    async def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> str:
        """What one of its tools says; `ToolError` if that is what is wrong with the call."""
        result = await self._ask(lambda client: client.call_tool(name, arguments), seconds)
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    async def _ask(self, what: Callable[[Any], Awaitable[Any]], seconds: float) -> Any:
        """What the client answers, in this event loop."""
        with _LOCK:
            self._asked += 1
        try:
            return await self._answer(what, seconds)
        finally:
            with _LOCK:
                self._asked -= 1
                unwanted = self._retired and not self._asked
            if unwanted:
                self.stop()

    async def _answer(self, what: Callable[[Any], Awaitable[Any]], seconds: float) -> Any:
        try:
            client = await self._in_time(asyncio.shield(_read(asyncio.wrap_future(self._client))), PATIENCE)
        except StallError:
            raise
        except Exception as error:  # whatever kept it from starting
            raise self._gone(_cause(error)) from error
        if not self._thread.is_alive():
            raise self._gone("it has ended")
        answer = asyncio.run_coroutine_threadsafe(_awaited(what(client)), self._loop)
        try:
            return await self._in_time(asyncio.wrap_future(answer), seconds)
        except self._mcp.MCPError as error:
            if error.code == _CLOSED:
                raise self._gone(str(error)) from error
            raise ToolError(str(error)) from None  # the server's answer, to what a policy asked

    async def _in_time(self, future: Awaitable[Any], seconds: float) -> Any:
        try:
            return await asyncio.wait_for(future, seconds)
        except TimeoutError:
            self._retire()
            raise StallError(f"the MCP server {self} did not answer in {seconds:g} s") from None

    def _gone(self, why: str) -> WorkerDied:
        self.stop()
        return WorkerDied(f"the MCP server {self} is gone: {why}")

    def __str__(self) -> str:
        return shlex.join(self._command)

    def _retire(self) -> None:
        """Let the next who needs it start another."""
        with _LOCK:
            self._retired = True
            if _SERVERS.get(self._command) is self:
                del _SERVERS[self._command]

    def stop(self) -> None:
        """End the server, whoever waits for it."""
        self._retire()
        with _LOCK:
            first, self._stopped = not self._stopped, True
        if first:  # or it would be disturbed while it ends
            with contextlib.suppress(RuntimeError):  # its loop is closed already
                self._loop.call_soon_threadsafe(self._serving.cancel)

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join(_GRACE)

    def _run(self) -> None:
        """The thread's work."""
        _RUNNING.add(self)
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self._loop.close()
        _RUNNING.discard(self)

    async def _serve(self) -> None:
        parameters = self._mcp.StdioServerParameters(command=self._command[0], args=list(self._command[1:]))
        try:
            async with self._mcp.Client(parameters) as client:
                self._client.set_result(client)
                await asyncio.Event().wait()  # for ever, until it is stopped
        except Exception as error:  # noqa: BLE001 - named boundary: who waits for the server learns why it ended
            if not self._client.done():
                self._client.set_exception(error)


async def _call(command: Sequence[str], name: str, seconds: float, /, **arguments: Any) -> str:
    """Call a tool of the server that runs now."""
    return await get_server(command).call(name, arguments, seconds)


def _read(future: "asyncio.Future[Any]") -> "asyncio.Future[Any]":
    """The future, whose error counts as read even if nobody waits for it any more."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


_SERVERS: dict[tuple[str, ...], McpServer] = {}
_RUNNING: set[McpServer] = set()  # those that are asked no more, too
_LOCK = threading.Lock()


def get_server(command: Sequence[str]) -> McpServer:
    """The running server of this command and its arguments; it is started if there is none."""
    with _LOCK:
        if (key := tuple(command)) not in _SERVERS:
            _SERVERS[key] = McpServer(key)
        return _SERVERS[key]


@atexit.register
def stop_servers() -> None:
    """End all servers of this process, and wait until they have."""
    running = list(_RUNNING)
    for each in running:
        each.stop()
    for each in running:
        each.join()
