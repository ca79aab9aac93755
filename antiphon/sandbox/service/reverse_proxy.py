"""Several worker processes behind one address.

Each worker holds a part of the sandboxes and environments; the proxy holds none. The hash of a sandbox's id says which worker
holds it. The proxy gives new sandboxes ids such that workers take turns. A worker that dies is replaced; its sandboxes are
lost.
"""

import asyncio
import itertools
import json
import os
import pickle
import re
import secrets
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from antiphon.core.errors import SandboxError
from antiphon.core.processes.child import Child, start_python
from antiphon.core.processes.framing import read_frame, write_frame
from antiphon.core.processes.own_process import die_with_parent
from antiphon.sandbox.service import rock
from antiphon.sandbox.service.bounds import run_while_connected
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.http_errors import RefusedError

GEM, SANDBOX = "/apis/v1/envs/gem", "/apis/envs/sandbox/v1"
NEW = (f"{SANDBOX}/start", f"{SANDBOX}/start_async", f"{GEM}/make")
RESTART_PATH = re.compile(f"{SANDBOX}/sandboxes/([^/]+)/restart")
DIVIDED_QUOTAS = ("sandboxes", "memory", "commands", "environments", "warm")
LIST, BATCH = f"{SANDBOX}/sandboxes", f"{SANDBOX}/sandboxes/batch"
BROADCAST = {("GET", "/"), ("GET", "/metrics"), ("GET", LIST), ("POST", BATCH)}
PAGE, LARGEST_PAGE = 500, 1000  # items of a list: by default, and at most
PAUSE_SECONDS = 0.5  # before a worker that has ended is replaced, so that one that fails at once costs little
END_SECONDS = 30.0  # for a worker to end by itself
HOP_BY_HOP = {b"content-length", b"host", b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding"}
HOP_BY_HOP |= {b"upgrade", b"expect", b"proxy-connection"}
FORWARDED_HEADERS = ("content-type", "www-authenticate", "content-security-policy", "referrer-policy", "cache-control")

Serve = Callable[[ServiceConfig, socket.socket], None]
"""Serves at a socket until it receives a signal. A function of a module, or a `functools.partial` of one."""


def divide_quotas(config: ServiceConfig) -> ServiceConfig:
    """Return the configuration of one of `config.workers` workers, with its share of each quota."""
    shares = {name: -(-getattr(config, name) // config.workers) for name in DIVIDED_QUOTAS}
    return config.model_copy(update={**shares, "workers": 1})


class Workers:
    """The worker processes. Use it as `async with`; leaving the block ends them and everything they hold."""

    def __init__(self, config: ServiceConfig, serve: Serve) -> None:
        self._share = divide_quotas(config)
        self._serve = serve
        self._folder = tempfile.TemporaryDirectory(prefix="antiphon-service-")
        places = [Path(self._folder.name) / str(index) for index in range(config.workers)]
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
            self._children[index] = child = _start_worker(self._serve, self._share, self._listeners[index])
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedRequest:
    """A request that is sent on to a worker."""

    method: str
    path: str
    target: bytes
    """The path as the client sent it, still escaped."""
    query: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        """Members of the body if it is a JSON object, else none."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


class ReverseProxy:
    """The ASGI application that forwards requests to workers. Serve it only while `workers` is entered."""

    def __init__(self, workers: Workers) -> None:
        self._clients = workers.clients
        self._turns = itertools.cycle(range(len(workers.clients)))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        request = Request(scope, receive)
        try:
            answer = await self._receive(request)
        except ClientDisconnect:
            return
        except HTTPException as error:
            answer = _error_response(error.status_code, str(error.detail))
        except MultiPartException as error:
            answer = _error_response(400, error.message)
        except RefusedError as error:  # the client has disconnected
            answer = _error_response(410, str(error), rock.LOST)
        kept = {name: value for name, value in answer.headers.items() if name in FORWARDED_HEADERS}
        await Response(answer.content, answer.status_code, kept)(scope, receive, send)

    async def _receive(self, request: Request) -> httpx.Response:
        """Read a request and return its answer; give up if the client disconnects."""
        headers = [(name, value) for name, value in request.headers.raw if name not in HOP_BY_HOP]
        forwarded = ForwardedRequest(
            method=request.method,
            path=request.scope["path"],
            target=request.scope["raw_path"],
            query=request.url.query,
            headers=headers,
            body=await request.body(),
        )
        if not forwarded.target.startswith(b"/"):
            raise HTTPException(400, "the target of the request must be a path")
        try:
            return await run_while_connected(request.receive, self._answer(request, forwarded))
        except httpx.TransportError as error:
            return _error_response(410, f"the worker that held it was lost: {type(error).__name__}", rock.LOST)

    async def _answer(self, request: Request, forwarded: ForwardedRequest) -> httpx.Response:
        if (forwarded.method, forwarded.path) in BROADCAST:
            return await self._broadcast(request, forwarded)
        name = await _sandbox_id_of(request, forwarded)
        if name is None and forwarded.path in NEW and forwarded.fields:
            turn = next(self._turns)
            name = next(name for name in iter(lambda: secrets.token_hex(16), "") if self._worker_of(name) == turn)
            forwarded = replace(forwarded, body=json.dumps({**forwarded.fields, "sandbox_id": name}).encode())
        return await self._forward(next(self._turns) if name is None else self._worker_of(name), forwarded)

    async def _broadcast(self, request: Request, forwarded: ForwardedRequest) -> httpx.Response:
        answers = await asyncio.gather(*(self._forward(index, forwarded) for index in range(len(self._clients))))
        refused = next((answer for answer in answers if answer.is_error), None)
        if refused is not None:
            return refused
        if forwarded.path == "/":
            content = b"".join(answer.content for answer in answers)
            return httpx.Response(200, headers=answers[0].headers, content=content)
        if forwarded.path == "/metrics":
            return httpx.Response(200, text=_sum_metrics(answer.text for answer in answers))
        if forwarded.path == BATCH:
            return httpx.Response(200, json=rock.success({"statuses": _merge_lists(answers, "statuses")}))
        return await self._list(request, forwarded)

    async def _list(self, request: Request, forwarded: ForwardedRequest) -> httpx.Response:
        """Return one page of the sandboxes of all workers, oldest first."""
        query, found = dict(request.query_params), list[dict[str, Any]]()
        page, size = int(query.pop("page", 1)), int(query.pop("page_size", PAGE))
        for index in range(len(self._clients)):
            for number in itertools.count(1):
                wanted = httpx.QueryParams({**query, "page": number, "page_size": LARGEST_PAGE})
                answer = await self._forward(index, replace(forwarded, query=str(wanted)))
                if answer.is_error:
                    return answer
                found += answer.json()["result"]["items"]
                if not answer.json()["result"]["has_more"]:
                    break
        found.sort(key=lambda item: item["create_time"])
        items = found[(page - 1) * size : page * size]
        more = page * size < len(found)
        return httpx.Response(200, json=rock.success({"items": items, "total": len(found), "has_more": more}))

    def _worker_of(self, name: str) -> int:
        return zlib.crc32(name.encode("utf-8", "surrogatepass")) % len(self._clients)

    async def _forward(self, index: int, forwarded: ForwardedRequest) -> httpx.Response:
        target = forwarded.target + (b"?" + forwarded.query.encode() if forwarded.query else b"")
        url = self._clients[index].base_url.copy_with(raw_path=target.replace(b"#", b"%23"))
        return await self._clients[index].request(
            forwarded.method, url, content=forwarded.body, headers=list(forwarded.headers)
        )


async def _sandbox_id_of(request: Request, forwarded: ForwardedRequest) -> str | None:
    """Return the id of the sandbox or environment that a request names, if any."""
    if found := RESTART_PATH.fullmatch(forwarded.path):
        return found[1]
    if "sandbox_id" in request.query_params:
        return request.query_params["sandbox_id"]
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        name = (await request.form()).get("sandbox_id")
    else:
        name = forwarded.fields.get("sandbox_id")
    return name if isinstance(name, str) else None


def _error_response(status: int, message: str, code: int = rock.BAD_REQUEST) -> httpx.Response:
    return httpx.Response(status, json=rock.failure(message, code))


def _merge_lists(answers: Iterable[httpx.Response], key: str) -> list[Any]:
    return [item for answer in answers for item in answer.json()["result"][key]]


def _sum_metrics(texts: Iterable[str]) -> str:
    """Add up the metrics of several workers. All of them are counts, so that sums are right."""
    sums: dict[str, float] = {}
    for line in itertools.chain.from_iterable(text.splitlines() for text in texts):
        name, _, value = line.rpartition(" ")
        if line.startswith("#"):
            sums.setdefault(line, 0.0)
        else:
            sums[name] = sums.get(name, 0.0) + float(value)
    return "".join(f"{name}\n" if name.startswith("#") else f"{name} {value:.12g}\n" for name, value in sums.items())
