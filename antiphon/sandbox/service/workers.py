"""Worker processes of a service: each serves at a socket of its own, and one that dies is replaced.

A front shares sandboxes and environments over them (`upstreams.py`). Those of a worker that dies are lost.
"""

import asyncio
import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from antiphon.core.errors import SandboxError
from antiphon.core.processes.child import Child, start_python
from antiphon.core.processes.framing import read_frame, write_frame
from antiphon.core.processes.own_process import die_with_parent
from antiphon.sandbox.service.config import ServiceConfig

PAUSE_SECONDS = 0.5  # before a worker that has ended is replaced, so that one that fails at once costs little
END_SECONDS = 30.0  # for a worker to end by itself

Serve = Callable[[ServiceConfig, socket.socket], None]
"""Serves at a socket until it receives a signal. A function of a module, or a `functools.partial` of one."""


class Workers:
    """The worker processes. Use it as `async with`; leaving the block ends them and everything they hold."""

    def __init__(self, config: ServiceConfig, serve: Serve) -> None:
        # Each has the whole quotas, because the front counts what all of them hold; they share only what is started in advance.
        warm = -(-config.warm // config.workers)
        self._config = config.model_copy(update={"workers": 1, "warm": warm})
        self._serve = serve
        self._folder = tempfile.TemporaryDirectory(prefix="antiphon-service-")
        self.sockets = places = [Path(self._folder.name) / str(index) for index in range(config.workers)]
        # The sockets stay open here, so that requests wait in them while a worker starts or is replaced.
        self._listeners = [_listen(place) for place in places]
        self.clients = [
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(place), limits=httpx.Limits(max_connections=None)),
                base_url="http://worker",
                timeout=None,
            )
            for place in places
        ]
        self._supervisors: list[asyncio.Task[None]] = []
        self._children: dict[int, Child] = {}
        self._is_ready = False

    async def __aenter__(self) -> Self:
        """Start all workers and wait until they answer; raise `SandboxError` if one cannot start."""
        self._supervisors = [asyncio.create_task(self._supervise(index)) for index in range(len(self.clients))]
        answers = asyncio.create_task(self._all_answer())
        try:
            await asyncio.wait([answers, *self._supervisors], return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                raise SandboxError("a worker of the service ended before it was ready; its output says why")
        except BaseException:
            answers.cancel()
            await self.__aexit__(None, None, None)
            raise
        self._is_ready = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for supervisor in self._supervisors:
            supervisor.cancel()
        for child in self._children.values():
            child.terminate()
        for child in self._children.values():
            await child.wait(END_SECONDS)
            child.kill()
        await asyncio.gather(*(client.aclose() for client in self.clients))
        for listener in self._listeners:
            listener.close()
        self._folder.cleanup()

    async def _all_answer(self) -> None:
        await asyncio.gather(*(client.get("/") for client in self.clients))

    async def _supervise(self, index: int) -> None:
        """Start a worker, and replace it whenever it ends."""
        while True:
            self._children[index] = child = _start_worker(self._serve, self._config, self._listeners[index])
            await child.wait()
            if not self._is_ready:
                return
            await asyncio.sleep(PAUSE_SECONDS)


def _listen(place: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen(1024)
    return listener


def _start_worker(serve: Serve, config: ServiceConfig, listener: socket.socket) -> Child:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        given = [theirs.fileno(), listener.fileno()]
        child = start_python(f"{__name__}:{run_worker.__name__}", *given, os.getpid(), descriptors=given)
        write_frame(ours, pickle.dumps((serve, config)))  # not on the command line: the token is in it
    return child


def run_worker(order: int, listener: int, parent: int) -> None:
    """Run a worker until it ends, or the service does.

    Args:
        order: Descriptor of the socket that brings the function to call and its configuration.
        listener: Descriptor of the socket to serve at.
        parent: Process id of the service.
    """
    die_with_parent(parent)
    with socket.socket(fileno=order) as connection:
        content = read_frame(connection)
    if content is not None:  # else the service has ended
        serve, config = pickle.loads(content)
        serve(config, socket.socket(fileno=listener))
