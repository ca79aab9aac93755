"""The HTTP application of a front: the interface of one service, answered by the services behind it.

No request is passed on as it came. What is sent is made of a route of the service, the decoded values of the query, a few
headers and the body. The upstream gets its own token in place of the client's.
"""

import asyncio
import itertools
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from antiphon.sandbox.remote import PATH as PROGRAM
from antiphon.sandbox.service import rock
from antiphon.sandbox.service.bounds import LONGEST_MESSAGE, run_while_connected
from antiphon.sandbox.service.holdings import HOLDINGS_PATH, Kind
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.manager import ID
from antiphon.sandbox.service.page import SECURITY_HEADERS, render_upstreams
from antiphon.sandbox.service.records import State
from antiphon.sandbox.service.routes import GEM, SANDBOX, EnvironmentRoutes, SandboxRoutes
from antiphon.sandbox.service.upstreams import ForwardedRequest, Upstream, Upstreams

T = TypeVar("T")

START, MAKE = (f"{SANDBOX}/start", f"{SANDBOX}/start_async"), f"{GEM}/make"
RESTART = re.compile(f"{SANDBOX}/restart|{SANDBOX}/sandboxes/({ID.pattern})/restart")
COMMIT = re.compile(f"{SANDBOX}/commit/({ID.pattern})")
LIST, BATCH, PAGE, METRICS = f"{SANDBOX}/sandboxes", f"{SANDBOX}/sandboxes/batch", "/", "/metrics"
ROUTES = {PAGE, METRICS, "/openapi.json", PROGRAM, HOLDINGS_PATH, BATCH}
ROUTES |= {f"{SANDBOX}/{name}" for name in (*SandboxRoutes.POST, *SandboxRoutes.GET)}
ROUTES |= {f"{GEM}/{name}" for name in EnvironmentRoutes.POST}
COMMANDS = {f"{SANDBOX}/{name}" for name in (*SandboxRoutes.COMMANDS, "get_sandbox_statistics")}
REQUEST_HEADERS = (b"content-type", b"x-user-id", b"x-experiment-id", b"x-namespace")
LARGEST_PAGE = 1000  # items of a list


class ReverseProxy:
    """The ASGI application. Serve it only while `upstreams` is entered."""

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams = upstreams

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        request = Request(scope, receive)
        try:
            forwarded = await _read(request)
            name = await _read_id(request, forwarded)
            answer = await run_while_connected(request.receive, self._respond(forwarded, name))
        except ClientDisconnect:
            return
        except HTTPException as error:
            answer = _failure(error.status_code, str(error.detail))
        except MultiPartException as error:
            answer = _failure(400, error.message)
        except RefusedError as error:  # the client has disconnected
            answer = _refusal(error)
        headers = {**SECURITY_HEADERS, "Content-Type": answer.headers["content-type"]}
        await Response(answer.content, answer.status_code, headers)(scope, receive, send)

    async def _respond(self, request: ForwardedRequest, name: str | None) -> httpx.Response:
        if request.path in (*START, MAKE) or RESTART.fullmatch(request.path):
            # If the client disconnects, the start still counts until it has ended.
            return await self._upstreams.run_to_end(_catch_refusal(self._start(request, name)))
        return await _catch_refusal(self._answer(request, name))

    async def _start(self, request: ForwardedRequest, name: str | None) -> httpx.Response:
        """Start a sandbox or an environment, or a stopped sandbox again."""
        upstreams, kind = self._upstreams, Kind.ENVIRONMENT if request.path == MAKE else Kind.SANDBOX
        if RESTART.fullmatch(request.path):
            return await (upstreams.send_to_any(request) if name is None else upstreams.restart(name, request))
        try:
            if kind is Kind.ENVIRONMENT:
                rock.MakeBody.model_validate(request.fields)
                memory, new = 0, f"env-{secrets.token_hex(16)}"
            else:
                memory = rock.parse_size(rock.StartBody.model_validate(request.fields).memory)
                new = secrets.token_hex(16)
        except ValidationError:
            return await upstreams.send_to_any(request)  # which says what is wrong
        if name is None:
            body = json.dumps({**request.fields, "sandbox_id": new}).encode()
            return await upstreams.start(kind, new, memory, replace(request, body=body))
        found = await upstreams.find(kind, name)
        if found is not None and found[1].state is not State.DELETED:
            return await upstreams.start_on(found[0], kind, name, memory, request)  # which says that it exists already
        return await upstreams.start(kind, name, memory, request)

    async def _answer(self, request: ForwardedRequest, name: str | None) -> httpx.Response:
        if request.path == HOLDINGS_PATH:
            return httpx.Response(200, text=self._upstreams.get_holdings().model_dump_json())
        if request.path in (PAGE, METRICS):
            return await self._join_texts(request)
        if request.path in (LIST, BATCH):
            return await self._join_lists(request)
        if request.path == PROGRAM:
            with self._upstreams.counting("programs"):
                return await self._upstreams.send_to_any(request)
        if name is None:
            return await self._upstreams.send_to_any(request)
        kind = Kind.ENVIRONMENT if request.path.startswith(GEM) else Kind.SANDBOX
        if request.path in COMMANDS:
            with self._upstreams.counting("commands"):
                return await self._upstreams.send(kind, name, request)
        return await self._upstreams.send(kind, name, request)

    async def _join_texts(self, request: ForwardedRequest) -> httpx.Response:
        answers, _ = await self._ask_each(lambda upstream: upstream.send(request))
        states = [(each.name, each.describe_problem() if each.problem else "") for each in self._upstreams.members]
        if request.path == PAGE:
            content = render_upstreams(states).encode() + b"".join(answer.content for answer in answers)
            return httpx.Response(200, html=content.decode(errors="replace"))
        lost = sum(bool(problem) for _, problem in states)
        name = f"antiphon_sandbox_{self._upstreams.kind}"
        own = f'# TYPE {name} gauge\n{name}{{state="up"}} {len(states) - lost}\n{name}{{state="down"}} {lost}\n'
        return httpx.Response(200, text=_sum_metrics([own, *(answer.text for answer in answers)]))

    async def _join_lists(self, request: ForwardedRequest) -> httpx.Response:
        """Return the status of sandboxes of all upstreams, and the names of upstreams that do not answer."""
        try:
            if request.path == BATCH:
                rock.BatchBody.model_validate(request.fields)
                found, missing = await self._ask_each(lambda upstream: _get_result(upstream, request))
                statuses = [item for result in found for item in result["statuses"]]
                return httpx.Response(200, json=rock.success({"statuses": statuses, "unreachable": missing}))
            query = rock.ListQuery.model_validate(request.query)
        except ValidationError:
            return await self._upstreams.send_to_any(request)  # which says what is wrong
        lists, missing = await self._ask_each(lambda upstream: _list_all(upstream, request))
        items = sorted(itertools.chain.from_iterable(lists), key=lambda item: item["create_time"])
        end = query.page * query.page_size
        page = {"items": items[end - query.page_size : end], "total": len(items), "has_more": end < len(items)}
        return httpx.Response(200, json=rock.success({**page, "unreachable": missing}))

    async def _ask_each(self, ask: Callable[[Upstream], Awaitable[T]]) -> tuple[list[T], list[str]]:
        """Return the answers of all upstreams, and the names of those that gave none; raise if none gave one."""
        members = self._upstreams.members
        found = await asyncio.gather(*map(ask, members), return_exceptions=True)
        refusals = [each for each in found if isinstance(each, BaseException)]
        unexpected = [each for each in refusals if not isinstance(each, RefusedError)]
        if unexpected or len(refusals) == len(members):
            raise (unexpected or refusals)[0]
        missing = [each.name for each, answer in zip(members, found, strict=True) if isinstance(answer, RefusedError)]
        return [each for each in found if not isinstance(each, BaseException)], missing


async def _catch_refusal(answer: Awaitable[httpx.Response]) -> httpx.Response:
    try:
        return await answer
    except RefusedError as error:
        return _refusal(error)


async def _read(request: Request) -> ForwardedRequest:
    """Read a request; raise `HTTPException` if it is not for a route of the service."""
    path = request.scope["path"]
    if path not in ROUTES and not RESTART.fullmatch(path) and not COMMIT.fullmatch(path):
        raise HTTPException(404, "Not Found")
    if request.method not in ("GET", "POST"):
        raise HTTPException(405, "Method Not Allowed")
    given, body = (
        dict(reversed(request.headers.raw)),
        await request.body(),
    )  # the first of several counts, as for FastAPI
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None
    return ForwardedRequest(
        method=request.method,
        path=path,
        query=dict(request.query_params),
        headers=[(name, given[name]) for name in REQUEST_HEADERS if name in given],
        body=body,
        fields=fields,
    )


async def _read_id(request: Request, forwarded: ForwardedRequest) -> str | None:
    """Return the id of the sandbox or environment that a request names, if any."""
    if (found := RESTART.fullmatch(forwarded.path) or COMMIT.fullmatch(forwarded.path)) and found[1]:
        return found[1]
    if forwarded.method == "GET":
        return forwarded.query.get("sandbox_id")
    fields = forwarded.fields
    if request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        fields = await request.form()
    name = fields.get("sandbox_id") if hasattr(fields, "get") else None
    return name if isinstance(name, str) else None


def _refusal(error: RefusedError) -> httpx.Response:
    status, code = rock.STATUS_CODES[error.reason]
    return _failure(status, str(error), code)


def _failure(status: int, message: str, code: int = rock.BAD_REQUEST) -> httpx.Response:
    return httpx.Response(status, json=rock.failure(message[:LONGEST_MESSAGE], code))


async def _get_result(upstream: Upstream, request: ForwardedRequest) -> Any:
    answer = await upstream.send(request)
    if not answer.is_success:
        raise RefusedError(Reason.UNREACHABLE, f"{upstream.name} answers with HTTP status {answer.status_code}")
    return answer.json()["result"]


async def _list_all(upstream: Upstream, request: ForwardedRequest) -> list[dict[str, Any]]:
    """Return all items of an upstream's list."""
    items: list[dict[str, Any]] = []
    for number in itertools.count(1):
        page = {**request.query, "page": str(number), "page_size": str(LARGEST_PAGE)}
        result = await _get_result(upstream, replace(request, query=page))
        items += result["items"]
        if not result["has_more"]:
            break
    return items


def _sum_metrics(texts: Iterable[str]) -> str:
    """Add up the metrics of several services. All of them are counts, so that sums are right."""
    sums: dict[str, float] = {}
    for line in itertools.chain.from_iterable(text.splitlines() for text in texts):
        name, _, value = line.rpartition(" ")
        if line.startswith("#"):
            sums.setdefault(line, 0.0)
        else:
            sums[name] = sums.get(name, 0.0) + float(value)
    return "".join(f"{name}\n" if name.startswith("#") else f"{name} {value:.12g}\n" for name, value in sums.items())
