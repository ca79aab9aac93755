"""The services behind a front: worker processes of this machine, or sandbox services of other machines.

The front knows nothing that an upstream does not know as well. Each upstream reports what it holds: every second, when the
front gets an id that it does not know, and before the front refuses a start because of a quota. The front counts a start itself
until the first report that it asks for after the start has ended. It therefore never counts too little, and refuses nothing by
an old count.

An upstream that does not report in time is unreachable. Requests to it fail at once, also those under way, new sandboxes go to
others, and what it holds does not count. Its next report ends this.
"""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import ValidationError
from websockets.exceptions import WebSocketException

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import SandboxError, StallError
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.holdings import HOLDINGS_PATH, Held, Holdings, Kind, Quotas
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.quotas import check_environments, check_sandboxes, check_under_way
from antiphon.sandbox.service.records import State
from antiphon.sandbox.service.upstream_ports import PortOfUpstream, ServiceAddress

T = TypeVar("T")

PAUSE_SECONDS = 1.0  # between two reports
SLACK_SECONDS = 60.0  # of a request beyond its longest step, for the other steps and for the answer to travel
LARGEST_ANSWER = 6 * (64 << 20) + (1 << 20)  # bytes; in JSON, each byte of the largest file may take six
_KEEP_ALIVE = [  # so that a request ends if its connection was lost while nothing was sent
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


class NotSentError(RefusedError):
    """A request that did not reach its upstream, so that it can go to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedRequest:
    """A request to an upstream."""

    method: str
    path: str
    """A route of the service, without escapes."""
    query: dict[str, str]
    headers: list[tuple[bytes, bytes]]
    body: bytes
    fields: Any = None
    """The decoded body if it is JSON, else None. Only `body` is sent."""


@dataclass(slots=True, kw_only=True, eq=False)
class Start:
    """A start that the last report may not show yet."""

    kind: Kind
    name: str
    held: Held
    has_ended: bool = False


class Upstream:
    """One service behind the front."""

    def __init__(
        self,
        name: str,
        client: httpx.AsyncClient,
        address: ServiceAddress,
        token: str,
        lost: Reason,
        config: ServiceConfig,
    ) -> None:
        """Ask nothing yet.

        Args:
            name: Its name in error messages.
            client: The connections to it.
            address: Where it listens.
            token: Its token.
            lost: Reason of refusing a request that it does not answer.
            config: Deadlines.
        """
        self.name = name
        self.client = client
        self._address = address
        self._token = token
        self.problem: Exception | None = None
        """Why it is unreachable; None if it is not."""
        self.report: Holdings | None = None
        """Its last report."""
        self._headers = [(b"authorization", f"Bearer {token}".encode()), (b"accept-encoding", b"identity")]
        self._lost = lost
        self._check_seconds = config.check_seconds
        self._seconds = SLACK_SECONDS + max(config.command_seconds, config.start_seconds, config.environment_seconds)
        self._starts: set[Start] = set()
        self._under_way: set[asyncio.Timeout] = set()
        self._deadlines = Deadlines()
        self._asking = asyncio.Lock()
        self._asked = self._answered = (
            0  # numbers of the last report asked for, and of the last one that came or failed
        )

    @property
    def busy(self) -> int:
        """Number of requests under way."""
        return len(self._under_way)

    def get(self, kind: Kind, name: str) -> Held | None:
        """Return a sandbox or an environment that it holds; None if it does not."""
        starting = (start.held for start in self._starts if (start.kind, start.name) == (kind, name))
        return next(starting, getattr(self.report, kind).get(name) if self.report else None)

    def all(self, kind: Kind) -> dict[str, Held]:
        """Return all that it holds, by id."""
        reported: dict[str, Held] = getattr(self.report, kind) if self.report else {}
        return reported | {start.name: start.held for start in self._starts if start.kind is kind}

    def load(self, kind: Kind) -> float:
        """Return the share of its quotas that is used: of number or memory, the larger one."""
        assert self.report is not None
        live = [held for held in self.all(kind).values() if held.live]
        memory = sum(held.memory for held in live) / (self.report.quotas.memory << 20)
        return max(memory, len(live) / getattr(self.report.quotas, kind))

    async def check(self) -> None:
        """Get a report that is asked for after this call; callers at the same time share one."""
        wanted = self._asked + 1
        async with self._asking:
            if self._answered < wanted:
                self._asked = number = self._asked + 1
                await self._get_report()
                self._answered = number

    async def _get_report(self) -> None:
        shown = {start for start in self._starts if start.has_ended}
        request = ForwardedRequest(method="GET", path=HOLDINGS_PATH, query={}, headers=[], body=b"")
        wait, seconds = self._deadlines.wait, self._check_seconds
        try:
            asked = self._exchange(request)
            answer = await wait(asked, name="report", owner="the front", on=self.name, deadline=seconds)
            if answer.status_code != 200:
                cause = "refuses the token" if answer.status_code == 401 else "is no sandbox service of this version"
                raise SandboxError(f"it {cause} (HTTP status {answer.status_code})")
            self.report = Holdings.model_validate_json(answer.content)
        except StallError:
            self._fail(TimeoutError(f"no report within {seconds:g} s (check_seconds)"))
        except ValidationError:
            self._fail(SandboxError("it is no sandbox service of this version"))
        except (httpx.HTTPError, SandboxError) as error:
            self._fail(error)
        else:
            self.problem = None
            self._starts -= shown

    def _fail(self, problem: Exception) -> None:
        self.problem = problem
        self.end_requests()

    def end_requests(self) -> None:
        """End the requests under way with `RefusedError`."""
        for timeout in self._under_way:
            if not timeout.expired():
                timeout.reschedule(0)

    async def start(self, kind: Kind, name: str, memory: int, request: ForwardedRequest) -> httpx.Response:
        """Send the request for a start, and count it. Raises as `send`."""
        start = Start(kind=kind, name=name, held=Held(state=State.PENDING, memory=memory))
        self._starts.add(start)
        try:
            answer = await self.send(request)
            if answer.is_error:
                self._starts.remove(start)
            return answer
        except NotSentError:
            self._starts.remove(start)
            raise
        finally:
            start.has_ended = True

    async def send(self, request: ForwardedRequest) -> httpx.Response:
        """Send a request on and return its answer.

        Raises:
            NotSentError: It is unreachable.
            RefusedError: It gave no answer, or one that is not valid.
        """
        if self.problem is not None:
            raise NotSentError(self._lost, self.describe_problem())
        try:
            async with asyncio.timeout(self._seconds) as timeout:
                self._under_way.add(timeout)
                try:
                    answer = await self._exchange(request)
                finally:
                    self._under_way.remove(timeout)
        except httpx.ConnectError as error:
            raise NotSentError(self._lost, f"{self.name} does not answer: {_text(error)}") from error
        except (TimeoutError, httpx.HTTPError) as error:
            message = f"{self.name} was lost before it answered: {_text(self.problem or error)}"
            raise RefusedError(self._lost, message) from error
        if answer.status_code == 401:  # the front's token is wrong, not the client's
            raise RefusedError(self._lost, f"{self.name} refuses the token of this service")
        return answer

    @asynccontextmanager
    async def connect(self, sandbox_id: str, port: int) -> AsyncIterator[PortOfUpstream]:
        """Connect to a port of a sandbox that it holds, for as long as the block runs. Raises `RefusedError`."""
        try:
            async with asyncio.timeout(self._seconds) as timeout:
                self._under_way.add(timeout)
                try:
                    async with self._address.connect(sandbox_id, port, self._token) as connection:
                        yield connection
                finally:
                    self._under_way.remove(timeout)
        except (OSError, WebSocketException) as error:  # `TimeoutError` is an `OSError`
            raise RefusedError(self._lost, f"{self.name} does not answer: {_text(self.problem or error)}") from error

    def describe_problem(self) -> str:
        """Return its name and why it is unreachable."""
        return f"{self.name} does not answer: {_text(self.problem)}"

    async def _exchange(self, request: ForwardedRequest) -> httpx.Response:
        headers, content = [*request.headers, *self._headers], bytearray()
        async with self.client.stream(
            request.method, request.path, params=request.query, headers=headers, content=request.body
        ) as answer:
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > LARGEST_ANSWER:
                    raise RefusedError(self._lost, f"{self.name} answers with more than {LARGEST_ANSWER} bytes")
        kind = {"Content-Type": answer.headers.get("content-type", "application/json")}
        return httpx.Response(answer.status_code, headers=kind, content=bytes(content))


def _text(error: BaseException | None) -> str:
    return str(error) or type(error).__name__


def connect_to_hosts(config: ServiceConfig, tokens: Sequence[str]) -> list[Upstream]:
    """Return an upstream for each of `config.hosts`, with its token."""
    found, context = [], ssl.create_default_context()
    no_cookies = CookieJar(
        DefaultCookiePolicy(allowed_domains=())
    )  # else one client's would be sent with the next one's
    for url, token in zip(config.hosts, tokens, strict=True):
        limits = httpx.Limits(max_connections=None)
        transport = httpx.AsyncHTTPTransport(verify=context, limits=limits, socket_options=_KEEP_ALIVE)
        client = httpx.AsyncClient(transport=transport, base_url=url, cookies=no_cookies, timeout=None, trust_env=False)
        address = ServiceAddress(url=url)
        found.append(Upstream(f"host {url}", client, address, token, Reason.UNREACHABLE, config))
    return found


class Upstreams:
    """All services behind the front. Use it as `async with`; leaving the block ends the requests under way to them."""

    def __init__(self, members: Sequence[Upstream], config: ServiceConfig) -> None:
        """Ask nothing yet."""
        self.members = members
        self.kind = "hosts" if config.hosts else "workers"
        self._config = config
        # Hosts have quotas of their own. The front has the sum, unless it is given others.
        self._given = config.model_fields_set if config.hosts else Quotas.model_fields.keys()
        self._busy: Counter[str] = Counter()
        self._tasks = asyncio.TaskGroup()
        self._checks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Get the first reports; raise `SandboxError` if one answers with an error, or none answers."""
        await asyncio.gather(*(each.check() for each in self.members))
        wrong = [each for each in self.members if isinstance(each.problem, SandboxError)]
        if wrong or not self.reachable:
            await self._close_clients()
            raise SandboxError("; ".join(each.describe_problem() for each in wrong or self.members))
        await self._tasks.__aenter__()
        self._checks = [self._tasks.create_task(_check_forever(each)) for each in self.members]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for check in self._checks:
            check.cancel()
        for each in self.members:
            each.end_requests()
        await self._tasks.__aexit__(kind, error, trace)
        await self._close_clients()

    async def _close_clients(self) -> None:
        await asyncio.gather(*(each.client.aclose() for each in self.members))

    @property
    def reachable(self) -> list[Upstream]:
        """Those that answer."""
        return [each for each in self.members if each.problem is None]

    async def check(self) -> None:
        """Get a new report of all that are reachable."""
        await asyncio.gather(*(each.check() for each in self.reachable))

    async def run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which must not raise. It goes on if the caller is cancelled."""
        return await asyncio.shield(self._tasks.create_task(work))

    def get_holdings(self) -> Holdings:
        """Return what all of them hold, as a report to a front that has this one as a host."""
        held = {kind.value: {k: v for each in self.members for k, v in each.all(kind).items()} for kind in Kind}
        largest = max(quotas.sandbox_memory for quotas in self._quotas)
        limits = {name: self._limit(name) for name in Quotas.model_fields}
        return Holdings(**held, quotas=Quotas(**{**limits, "sandbox_memory": largest}))

    @property
    def _quotas(self) -> list[Quotas]:
        return [each.report.quotas for each in self.members if each.report is not None]

    def _limit(self, quota: str) -> int:
        given: int = getattr(self._config, quota)
        return given if quota in self._given else sum(getattr(quotas, quota) for quotas in self._quotas)

    async def find(self, kind: Kind, name: str) -> tuple[Upstream, Held] | None:
        """Return a sandbox or an environment, and the upstream that holds it, or held it when it last answered."""
        found = self._find(kind, name)
        if found is None or found[1].state is State.DELETED:
            await self.check()  # one that was deleted may have been started again, on another upstream
            found = self._find(kind, name)
        return found

    def _find(self, kind: Kind, name: str) -> tuple[Upstream, Held] | None:
        holders = [(each, held) for each in self.members if (held := each.get(kind, name)) is not None]
        holders.sort(key=lambda pair: (pair[1].state is State.DELETED, pair[0].problem is not None))
        return holders[0] if holders else None

    async def send(self, kind: Kind, name: str, request: ForwardedRequest) -> httpx.Response:
        """Send a request to the upstream that holds a sandbox or an environment. Raises `RefusedError`."""
        found = await self.find(kind, name)
        if found is not None:
            return await found[0].send(request)
        unknown = [each.describe_problem() for each in self.members if each.report is None]
        if unknown:
            raise RefusedError(Reason.UNREACHABLE, f"{name!r} is not on the hosts that answer; {'; '.join(unknown)}")
        return await self.send_to_any(request)  # which says that there is none

    @asynccontextmanager
    async def connect(self, sandbox_id: str, port: int) -> AsyncIterator[PortOfUpstream]:
        """Connect to a port of a sandbox for as long as the block runs. It counts as a command. Raises `RefusedError`."""
        found = await self.find(Kind.SANDBOX, sandbox_id)
        if found is None:
            raise RefusedError(Reason.UNKNOWN, f"there is no sandbox {sandbox_id!r} on the hosts that answer")
        with self.counting("commands"):
            async with found[0].connect(sandbox_id, port) as connection:
                yield connection

    async def send_to_any(self, request: ForwardedRequest) -> httpx.Response:
        """Send a request that any of them can answer. Raises `RefusedError`."""
        for each in sorted(self.reachable, key=lambda each: each.busy):
            try:
                return await each.send(request)
            except NotSentError:
                continue
        raise _no_answer()

    async def start(self, kind: Kind, name: str, memory: int, request: ForwardedRequest) -> httpx.Response:
        """Start a sandbox or an environment on the upstream with the most room.

        Args:
            kind: Which of both.
            name: Its id.
            memory: Bytes that it asks for; it gets at most what the upstream gives one.
            request: The request for the start.

        Raises:
            RefusedError: A quota of the front is used up, or no upstream answers.
        """
        refusal: httpx.Response | None = None
        tried: set[Upstream] = set()
        while left := [each for each in self.reachable if each not in tried]:
            best = min(left, key=lambda each: each.load(kind))
            tried.add(best)
            try:
                answer = await self.start_on(best, kind, name, memory, request)
            except NotSentError:
                continue
            if answer.status_code != 429:
                return answer
            refusal = answer
        if refusal is None:
            raise _no_answer()
        return refusal

    async def start_on(
        self, upstream: Upstream, kind: Kind, name: str, memory: int, request: ForwardedRequest
    ) -> httpx.Response:
        """Start a sandbox or an environment on this upstream. Arguments and errors are those of `start`."""
        quotas = None if upstream.report is None else upstream.report.quotas
        granted = memory if quotas is None else min(memory, quotas.sandbox_memory << 20)
        await self._admit(kind, name, granted)
        return await upstream.start(kind, name, granted, request)

    async def restart(self, name: str, request: ForwardedRequest) -> httpx.Response:
        """Start a stopped sandbox again, where it is. Raises `RefusedError`."""
        found = await self.find(Kind.SANDBOX, name)
        if found is None:
            return await self.send(Kind.SANDBOX, name, request)
        upstream, held = found
        return await self.start_on(upstream, Kind.SANDBOX, name, held.memory, request)

    async def _admit(self, kind: Kind, name: str, memory: int) -> None:
        """Raise `RefusedError` if a start would exceed a quota. Until the caller waits for something, it would not."""
        try:
            self._check_quotas(kind, name, memory)
        except RefusedError:
            await self.check()  # some may have ended since the last report
            self._check_quotas(kind, name, memory)

    def _check_quotas(self, kind: Kind, name: str, memory: int) -> None:
        held = [(other, each) for upstream in self.reachable for other, each in upstream.all(kind).items()]
        live = [each.memory for other, each in held if each.live and other != name]
        if kind is Kind.SANDBOX:
            check_sandboxes(self._limit("sandboxes"), self._limit("memory"), live, memory)
        else:
            check_environments(self._limit("environments"), len(live))

    @contextmanager
    def counting(self, what: str) -> Iterator[None]:
        """Count a command or a program while the block runs; raise `RefusedError` if there are too many."""
        check_under_way(what, self._busy[what], self._limit("commands"))
        self._busy[what] += 1
        try:
            yield
        finally:
            self._busy[what] -= 1


def _no_answer() -> RefusedError:
    return RefusedError(Reason.UNREACHABLE, "no host answers; try again later")


async def _check_forever(upstream: Upstream) -> None:
    while True:
        await upstream.check()
        await asyncio.sleep(PAUSE_SECONDS)
