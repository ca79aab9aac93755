"""Sandboxes that are started ahead: real ones, which are given out once, replaced, and ended."""

import asyncio
import os
import signal

import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.sandbox.base import Limits
from antiphon.sandbox.service.metrics import Metrics
from antiphon.sandbox.service.warm_pool import WarmPool
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.sandbox.sessions.session import Session

pytestmark = pytest.mark.commands("bwrap")

DEFAULT = ShellSandboxConfig(limits=Limits(seconds=30, memory=256 << 20, processes=40))
OTHER = ShellSandboxConfig(limits=Limits(seconds=30, memory=128 << 20, processes=40))
IMPOSSIBLE = ShellSandboxConfig(
    limits=Limits(seconds=30, memory=256 << 20, processes=40), image="antiphon-no-such-image"
)


def pooled(test, size=2, default=DEFAULT):
    """Run `test(pool, metrics, settle)`; `settle` returns once what the pool has begun is done."""

    async def main():
        rooms, metrics = RuntimeDirs(), Metrics()
        try:
            async with asyncio.TaskGroup() as tasks:
                pool = WarmPool(default, size, runtime_dirs=rooms, deadlines=Deadlines(), metrics=metrics, tasks=tasks)

                async def settle():
                    while others := [each for each in tasks._tasks if each is not asyncio.current_task()]:
                        await asyncio.wait(others)

                try:
                    await test(pool, metrics, settle)
                finally:
                    await settle()
                    await pool.close()
        finally:
            rooms.close()

    asyncio.run(asyncio.wait_for(main(), 100))


def test_one_that_is_ready_is_given_once_and_replaced():
    async def test(pool, metrics, settle):
        pool.maintain()
        await settle()
        assert len(pool) == 2
        ready = set(pool._ready)
        first, second = await pool.take(DEFAULT), await pool.take(DEFAULT)
        assert {first, second} == ready, "they were there, and each is given once"
        await Session(first).run("echo mine > /tmp/secret")
        await settle()
        assert len(pool) == 2 and not ready & set(pool._ready), "as many are started anew"
        third = await pool.take(DEFAULT)
        assert (await Session(third).run("cat /tmp/secret")).exit_code != 0
        for each in (first, second, third):
            await pool.close_backend(each)
            assert each.ended.done()

    pooled(test)


def test_another_kind_is_started_and_none_that_is_ready_is_spent():
    async def test(pool, metrics, settle):
        await pool.add_one()
        other = await pool.take(OTHER)
        assert other.config == OTHER and len(pool) == 1
        assert (await Session(other).run("echo here")).stdout == "here\n"
        await pool.close_backend(other)

    pooled(test)


def test_what_has_died_is_not_given_but_replaced():
    async def test(pool, metrics, settle):
        await pool.add_one()
        (dead,) = pool._ready
        signal.pidfd_send_signal(dead._first, signal.SIGKILL)
        await dead.ended
        given = await pool.take(DEFAULT)
        assert given is not dead and not given.ended.done()
        pool.maintain()
        await settle()
        assert len(pool) == 2 and dead not in pool._ready
        await pool.close_backend(given)

    pooled(test)


def test_those_that_are_too_many_end():
    async def test(pool, metrics, settle):
        pool.maintain()
        await settle()
        kept, surplus = pool._ready
        pool.size = 1
        pool.maintain()
        await settle()
        assert pool._ready == [kept] and surplus.ended.done() and not kept.ended.done()

    pooled(test)


def test_closing_ends_all():
    async def test(pool, metrics, settle):
        pool.maintain()
        await settle()
        watched = [os.dup(each._first) for each in pool._ready]
        ready = list(pool._ready)
        await pool.close()
        assert all(each.ended.done() for each in ready)
        for process in watched:
            with pytest.raises(ProcessLookupError):
                signal.pidfd_send_signal(process, 0)
            os.close(process)

    pooled(test)


def test_a_start_that_fails_is_counted_and_tried_again():
    async def test(pool, metrics, settle):
        for rounds in (1, 2):
            pool.maintain()
            await settle()
            assert len(pool) == 0 and metrics.total("antiphon_sandbox_start_failures") == 2 * rounds

    pooled(test, default=IMPOSSIBLE)
