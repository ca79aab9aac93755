"""What a front counts while reports of a host and starts on it cross each other. The host's side of the wire is scripted."""

import asyncio
import json

import httpx
import pytest

from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.holdings import HOLDINGS_PATH, Kind
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.upstream_ports import ServiceAddress
from antiphon.sandbox.service.upstreams import ForwardedRequest, NotSentError, Upstream

QUOTAS = {"sandboxes": 10, "memory": 100, "sandbox_memory": 10, "commands": 10, "environments": 10}
EMPTY = {"sandboxes": {}, "environments": {}, "quotas": QUOTAS}
START = ForwardedRequest(method="POST", path="/start", query={}, headers=[], body=b"{}")


class Wire:
    """Holds each report and each answer back until the test gives it."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[asyncio.Future[httpx.Response]] = asyncio.Queue()
        self.answers: asyncio.Queue[asyncio.Future[httpx.Response]] = asyncio.Queue()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        answer = asyncio.get_running_loop().create_future()
        (self.reports if request.url.path == HOLDINGS_PATH else self.answers).put_nowait(answer)
        return await answer

    async def report(self, **held) -> None:
        (await self.reports.get()).set_result(httpx.Response(200, text=json.dumps({**EMPTY, **held})))

    async def answer(self, status: int = 200) -> None:
        (await self.answers.get()).set_result(httpx.Response(status, text="{}"))


def run(body, **options) -> None:
    async def main():
        wire = Wire()
        client = httpx.AsyncClient(transport=httpx.MockTransport(wire), base_url="http://host")
        config = ServiceConfig(hosts=("http://host",), **options)
        upstream = Upstream("host", client, ServiceAddress(url="http://host"), "the-token", Reason.UNREACHABLE, config)
        await asyncio.gather(upstream.check(), wire.report())
        await body(upstream, wire)

    asyncio.run(asyncio.wait_for(main(), 60))


def names(upstream: Upstream) -> set[str]:
    return {*upstream.all(Kind.SANDBOX)}


def test_a_start_counts_until_a_later_report_shows_it():
    async def body(upstream, wire):
        start = asyncio.create_task(upstream.start(Kind.SANDBOX, "a", 5, START))
        answer = await wire.answers.get()
        assert names(upstream) == {"a"}
        check = asyncio.create_task(upstream.check())
        early = await wire.reports.get()  # asked for before the start has ended
        answer.set_result(httpx.Response(200, text="{}"))
        await start
        early.set_result(httpx.Response(200, text=json.dumps(EMPTY)))
        await check
        assert names(upstream) == {"a"}
        await asyncio.gather(upstream.check(), wire.report())
        assert names(upstream) == set()

    run(body)


def test_a_refused_start_does_not_count():
    async def body(upstream, wire):
        await asyncio.gather(upstream.start(Kind.SANDBOX, "a", 5, START), wire.answer(429))
        assert names(upstream) == set()

    run(body)


def test_calls_share_a_report_that_is_asked_for_after_them():
    async def body(upstream, wire):
        first = asyncio.create_task(upstream.check())
        early = await wire.reports.get()
        others = [asyncio.create_task(upstream.check()) for _ in range(3)]
        await asyncio.sleep(0)
        early.set_result(httpx.Response(200, text=json.dumps(EMPTY)))
        await first
        assert not any(each.done() for each in others)
        await wire.report(sandboxes={"b": {"state": "running", "memory": 1}})
        await asyncio.gather(*others)
        assert names(upstream) == {"b"} and wire.reports.empty()

    run(body)


def test_a_caller_that_leaves_takes_no_report_from_others():
    async def body(upstream, wire):
        first = asyncio.create_task(upstream.check())
        await wire.reports.get()
        second = asyncio.create_task(upstream.check())
        await asyncio.sleep(0)
        first.cancel()
        await wire.report()
        await second

    run(body)


def test_a_late_report_ends_requests_and_the_next_begins_anew():
    async def body(upstream, wire):
        under_way = asyncio.create_task(upstream.send(START))
        await wire.answers.get()
        await upstream.check()  # to its deadline
        with pytest.raises(RefusedError) as lost:
            await under_way
        assert lost.value.reason is Reason.UNREACHABLE and not isinstance(lost.value, NotSentError)
        with pytest.raises(NotSentError):
            await upstream.send(START)
        await wire.reports.get()  # the one that came too late
        await asyncio.gather(upstream.check(), wire.report())
        await asyncio.gather(upstream.send(START), wire.answer())

    run(body, check_seconds=0.05)


@pytest.mark.parametrize("text", ["", "[]", '{"sandboxes": {}}', '{"sandboxes": {"a": {"state": "odd"}}}'])
def test_a_report_that_is_none_makes_it_unreachable(text):
    async def body(upstream, wire):
        check = asyncio.create_task(upstream.check())
        (await wire.reports.get()).set_result(httpx.Response(200, text=text))
        await check
        assert upstream.problem is not None

    run(body)
