"""Several workers behind one address: each holds its part of the sandboxes and environments, and nothing is held here.

What a request is about has a name, and the hash of the name says which worker holds it; what is new and has no name gets one
here, so that workers take turns. A worker that dies takes along what it held, and is replaced.
"""

import asyncio
import itertools
import json
import multiprocessing
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
from antiphon.sandbox.isolation import kernel
from antiphon.sandbox.service import rock
from antiphon.sandbox.service.bounds import run_while_connected
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.http_errors import Refused

GEM, SANDBOX = "/apis/v1/envs/gem", "/apis/envs/sandbox/v1"
NEW = (f"{SANDBOX}/start", f"{SANDBOX}/start_async", f"{GEM}/make")
NAMED_IN_PATH = re.compile(f"{SANDBOX}/sandboxes/([^/]+)/restart")
DIVIDED = ("sandboxes", "memory", "commands", "environments", "warm")
LIST, BATCH = f"{SANDBOX}/sandboxes", f"{SANDBOX}/sandboxes/batch"
OF_ALL = {("GET", "/"), ("GET", "/metrics"), ("GET", LIST), ("POST", BATCH)}
PAGE, LARGEST_PAGE = 500, 1000  # of a list: what it has if nothing is said, and at most
PAUSE_SECONDS = 0.5  # before a worker that has ended is replaced, so that one that cannot live costs little
END_SECONDS = 30.0  # for a worker to end by itself
OF_A_CONNECTION = {b"content-length", b"host", b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding"}
OF_A_CONNECTION |= {b"upgrade", b"expect", b"proxy-connection"}
PASSED_ON = ("content-type", "www-authenticate", "content-security-policy", "referrer-policy", "cache-control")

Run = Callable[[ServiceConfig, socket.socket], None]
"""Serves at a socket until it is told to end. A function of a module, or a `functools.partial` of one."""


def share(config: ServiceConfig) -> ServiceConfig:
    """What one of `config.workers` is given."""
    shares = {name: -(-getattr(config, name) // config.workers) for name in DIVIDED}
    return config.model_copy(update={**shares, "workers": 1})


class Workers:
    """The processes. Use as `async with`; leaving it ends them, and what they hold."""

    def __init__(self, config: ServiceConfig, run: Run) -> None:
        self._share = share(config)
        self._run = run
        self._context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="antiphon-service-")
        places = [Path(self._folder.name) / str(index) for index in range(config.workers)]
        # A socket that is kept here: requests wait in it while a worker starts, or is replaced.
        self._listeners = [_listen(place) for place in places]
        self.clients = [
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(place), limits=httpx.Limits(max_connections=None)),
                base_url="http://worker",
                timeout=None,
            )
            for place in places
        ]
        self._keepers: list[asyncio.Task[None]] = []
        self._processes: dict[int, Any] = {}
        self._begun = False

    async def __aenter__(self) -> Self:
        """Ready when all workers are; `SandboxError` if one cannot be."""
        self._keepers = [asyncio.create_task(self._keep(index)) for index in range(len(self.clients))]
        answers = asyncio.create_task(self._all_answer())
        try:
            await asyncio.wait([answers, *self._keepers], return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                raise SandboxError("a worker of the service ended before it was ready; it said why")
        except BaseException:
            answers.cancel()
            await self.__aexit__(None, None, None)
            raise
        self._begun = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            await asyncio.to_thread(process.join, END_SECONDS)
            process.kill()
        await asyncio.gather(*(client.aclose() for client in self.clients))
        for listener in self._listeners:
            listener.close()
        self._folder.cleanup()

    async def _all_answer(self) -> None:
        await asyncio.gather(*(client.get("/") for client in self.clients))

    async def _keep(self, index: int) -> None:
        """Have a worker there, always."""
        loop = asyncio.get_running_loop()
        while True:
            process = self._context.Process(target=_live, args=(self._run, self._share, self._listeners[index]))
            process.start()
            self._processes[index] = process
            ended = loop.create_future()
            loop.add_reader(process.sentinel, ended.set_result, None)
            try:
                await ended
            finally:
                loop.remove_reader(process.sentinel)
            if not self._begun:
                return
            await asyncio.sleep(PAUSE_SECONDS)


def _listen(place: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen(1024)
    return listener


def _live(run: Run, config: ServiceConfig, listener: socket.socket) -> None:
    """The life of a worker."""
    kernel.die_with_parent()
    run(config, listener)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, as it is passed on."""

    method: str
    path: str
    target: bytes
    """The path as it was sent, with all that is escaped in it."""
    query: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        """Of its body, if that is an object of JSON."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


class Front:
    """The application that passes requests on, to be served while `workers` is entered."""

    def __init__(self, workers: Workers) -> None:
        self._clients = workers.clients
        self._turns = itertools.cycle(range(len(workers.clients)))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        request = Request(scope, receive)
        try:
            answer = await self._take(request)
        except ClientDisconnect:
            return
        except HTTPException as error:
            answer = _refused(error.status_code, str(error.detail))
        except MultiPartException as error:
            answer = _refused(400, error.message)
        except Refused as error:  # the client has gone
            answer = _refused(410, str(error), rock.LOST)
        kept = {name: value for name, value in answer.headers.items() if name in PASSED_ON}
        await Response(answer.content, answer.status_code, kept)(scope, receive, send)

    async def _take(self, request: Request) -> httpx.Response:
        """Read a request, and have it answered, as long as its client waits."""
        headers = [(name, value) for name, value in request.headers.raw if name not in OF_A_CONNECTION]
        asked = Asked(
            method=request.method,
            path=request.scope["path"],
            target=request.scope["raw_path"],
            query=request.url.query,
            headers=headers,
            body=await request.body(),
        )
        if not asked.target.startswith(b"/"):
            raise HTTPException(400, "the target of the request is no path")
        try:
            return await run_while_connected(request.receive, self._answer(request, asked))
        except httpx.TransportError as error:
            return _refused(410, f"the worker that had it was lost: {type(error).__name__}", rock.LOST)

    async def _answer(self, request: Request, asked: Asked) -> httpx.Response:
        if (asked.method, asked.path) in OF_ALL:
            return await self._ask_all(request, asked)
        name = await _subject(request, asked)
        if name is None and asked.path in NEW and asked.fields:
            turn = next(self._turns)
            name = next(name for name in iter(lambda: secrets.token_hex(16), "") if self._holder(name) == turn)
            asked = replace(asked, body=json.dumps({**asked.fields, "sandbox_id": name}).encode())
        return await self._pass_on(next(self._turns) if name is None else self._holder(name), asked)

    async def _ask_all(self, request: Request, asked: Asked) -> httpx.Response:
        answers = await asyncio.gather(*(self._pass_on(index, asked) for index in range(len(self._clients))))
        refused = next((answer for answer in answers if answer.is_error), None)
        if refused is not None:
            return refused
        if asked.path == "/":
            content = b"".join(answer.content for answer in answers)
            return httpx.Response(200, headers=answers[0].headers, content=content)
        if asked.path == "/metrics":
            return httpx.Response(200, text=_added_up(answer.text for answer in answers))
        if asked.path == BATCH:
            return httpx.Response(200, json=rock.success({"statuses": _collected(answers, "statuses")}))
        return await self._list(request, asked)

    async def _list(self, request: Request, asked: Asked) -> httpx.Response:
        """A page of what all workers have, oldest first."""
        query, found = dict(request.query_params), list[dict[str, Any]]()
        page, size = int(query.pop("page", 1)), int(query.pop("page_size", PAGE))
        for index in range(len(self._clients)):
            for number in itertools.count(1):
                wanted = httpx.QueryParams({**query, "page": number, "page_size": LARGEST_PAGE})
                answer = await self._pass_on(index, replace(asked, query=str(wanted)))
                if answer.is_error:
                    return answer
                found += answer.json()["result"]["items"]
                if not answer.json()["result"]["has_more"]:
                    break
        found.sort(key=lambda item: item["create_time"])
        items = found[(page - 1) * size : page * size]
        more = page * size < len(found)
        return httpx.Response(200, json=rock.success({"items": items, "total": len(found), "has_more": more}))

    def _holder(self, name: str) -> int:
        return zlib.crc32(name.encode("utf-8", "surrogatepass")) % len(self._clients)

    async def _pass_on(self, index: int, asked: Asked) -> httpx.Response:
        target = asked.target + (b"?" + asked.query.encode() if asked.query else b"")
        url = self._clients[index].base_url.copy_with(raw_path=target.replace(b"#", b"%23"))
        return await self._clients[index].request(asked.method, url, content=asked.body, headers=list(asked.headers))


async def _subject(request: Request, asked: Asked) -> str | None:
    """The name of what a request is about."""
    if found := NAMED_IN_PATH.fullmatch(asked.path):
        return found[1]
    if "sandbox_id" in request.query_params:
        return request.query_params["sandbox_id"]
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        name = (await request.form()).get("sandbox_id")
    else:
        name = asked.fields.get("sandbox_id")
    return name if isinstance(name, str) else None


def _refused(status: int, message: str, code: int = rock.BAD_REQUEST) -> httpx.Response:
    return httpx.Response(status, json=rock.failure(message, code))


def _collected(answers: Iterable[httpx.Response], key: str) -> list[Any]:
    return [item for answer in answers for item in answer.json()["result"][key]]


def _added_up(texts: Iterable[str]) -> str:
    """Metrics of several workers as those of one: all are counts, or numbers of something."""
    sums: dict[str, float] = {}
    for line in itertools.chain.from_iterable(text.splitlines() for text in texts):
        name, _, value = line.rpartition(" ")
        if line.startswith("#"):
            sums.setdefault(line, 0.0)
        else:
            sums[name] = sums.get(name, 0.0) + float(value)
    return "".join(f"{name}\n" if name.startswith("#") else f"{name} {value:.12g}\n" for name, value in sums.items())
