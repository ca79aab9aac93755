"""Tools of MCP servers that speak over standard input and output. Needs the package `mcp`, of the extra `envs`.

A server starts when it is first needed and serves all episodes of the process, so its tools should not depend on earlier
calls. Its client lives in a thread with an event loop of its own, because it outlasts the loops of episodes. A server that does
not answer in time is replaced for later calls; calls that it is already running may still succeed.
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

from antiphon.core.errors import StallError, WorkerDiedError
from antiphon.core.optional_packages import import_optional
from antiphon.tasks.environments.tools.toolbox import Tool, ToolError

START_SECONDS = 60.0  # that a server may take to start
STOP_SECONDS = 5.0  # that a server may take to stop
_CONNECTION_CLOSED = -32000  # error code


class McpServer:
    """A running server and its client.

    A server that does not answer a call in time is retired: it gets no new calls and stops when the last one has returned.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._mcp = import_optional("mcp", "an MCP server")
        self._command = tuple(command)
        self._client: Future[Any] = Future()
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._stopped = self._retired = False
        self._pending = 0  # calls without an answer
        self._thread = threading.Thread(target=self._run, name=f"mcp {command[0]}", daemon=True)
        self._thread.start()

    async def tools(self, seconds: float) -> list[Tool]:
        """Return all tools of the server; a call of one may take `seconds`."""
        page = await self._request(lambda client: client.list_tools(), START_SECONDS)
        listed = list(page.tools)
        while page.next_cursor:
            page = await self._request(operator.methodcaller("list_tools", cursor=page.next_cursor), START_SECONDS)
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
        """Call a tool and return its text.

        Raises:
            ToolError: The tool rejects the call.
        """
        result = await self._request(lambda client: client.call_tool(name, arguments), seconds)
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    async def _request(self, send: Callable[[Any], Awaitable[Any]], seconds: float) -> Any:
        """Send a request and return the answer in the caller's event loop."""
        with _LOCK:
            self._pending += 1
        try:
            return await self._await_answer(send, seconds)
        finally:
            with _LOCK:
                self._pending -= 1
                unused = self._retired and not self._pending
            if unused:
                self.stop()

    async def _await_answer(self, send: Callable[[Any], Awaitable[Any]], seconds: float) -> Any:
        try:
            client = await self._with_timeout(
                asyncio.shield(_retrieve_error(asyncio.wrap_future(self._client))), START_SECONDS
            )
        except StallError:
            raise
        except Exception as error:  # named boundary: anything may keep a program from starting
            raise self._stop_with(_cause(error)) from error
        if not self._thread.is_alive():
            raise self._stop_with("it has ended")
        answer = asyncio.run_coroutine_threadsafe(_awaited(send(client)), self._loop)
        try:
            return await self._with_timeout(asyncio.wrap_future(answer), seconds, "seconds")
        except self._mcp.MCPError as error:
            if error.code == _CONNECTION_CLOSED:
                raise self._stop_with(str(error)) from error
            raise ToolError(str(error)) from None  # the server's answer to the policy

    async def _with_timeout(self, future: Awaitable[Any], seconds: float, option: str = "") -> Any:
        """Wait for a future, as long as `option` of the environment says, if it is one that says it."""
        try:
            return await asyncio.wait_for(future, seconds)
        except TimeoutError:
            self._retire()
            longer = f"; the option {option} allows more" if option else ""
            raise StallError(f"the MCP server {self} did not answer in {seconds:g} s{longer}", option) from None

    def _stop_with(self, why: str) -> WorkerDiedError:
        """Stop the server and return the error for its callers."""
        self.stop()
        return WorkerDiedError(f"the MCP server {self} is gone: {why}")

    def __str__(self) -> str:
        return shlex.join(self._command)

    def _retire(self) -> None:
        """Take no new calls; the next caller starts another server."""
        with _LOCK:
            self._retired = True
            if _SERVERS.get(self._command) is self:
                del _SERVERS[self._command]

    def stop(self) -> None:
        """Stop the server, with calls pending or not."""
        self._retire()
        with _LOCK:
            first, self._stopped = not self._stopped, True
        if first:  # a second cancellation would interrupt its cleanup
            with contextlib.suppress(RuntimeError):  # its loop is closed already
                self._loop.call_soon_threadsafe(self._serving.cancel)

    def join(self) -> None:
        """Wait until the server has stopped."""
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        """Run the client; the target of the thread."""
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
                await asyncio.Event().wait()  # until it is cancelled
        except Exception as error:  # noqa: BLE001 - named boundary: callers learn why it ended
            if not self._client.done():
                self._client.set_exception(error)


async def _call(command: Sequence[str], name: str, seconds: float, /, **arguments: Any) -> str:
    """Call a tool of the current server with this command."""
    return await get_server(command).call(name, arguments, seconds)


def _retrieve_error(future: "asyncio.Future[Any]") -> "asyncio.Future[Any]":
    """Mark the error of a future as retrieved, even if nobody waits for it any more."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


_SERVERS: dict[tuple[str, ...], McpServer] = {}
_RUNNING: set[McpServer] = set()  # retired ones too
_LOCK = threading.Lock()


def get_server(command: Sequence[str]) -> McpServer:
    """Return the running server with this command; start it if there is none."""
    with _LOCK:
        if (key := tuple(command)) not in _SERVERS:
            _SERVERS[key] = McpServer(key)
        return _SERVERS[key]


@atexit.register
def stop_servers() -> None:
    """Stop all servers of this process and wait for them."""
    running = list(_RUNNING)
    for each in running:
        each.stop()
    for each in running:
        each.join()
