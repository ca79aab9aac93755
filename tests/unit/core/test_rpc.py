"""Concurrent calls to a worker."""

import asyncio

import pytest

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.errors import DataError, WorkerDiedError
from antiphon.core.rpc import Client, forwards
from tests.unit.core.rpc_worker import Surface


@forwards(Surface)
class SurfaceClient(Client, Surface):
    """Calls `Surface` in the worker, but for what it does itself."""

    async def open(self):
        await self.call("open")
        return "opened here"


def with_worker(test, factory="SurfaceWorker", debug=True, **answerers):
    async def main():
        cluster = LocalCluster(ClusterConfig(debug=debug))
        try:
            handle = cluster.spawn("worker", f"tests.unit.core.rpc_worker:{factory}")
            client = SurfaceClient(handle, answerers)
            return await asyncio.wait_for(test(client), 60)
        finally:
            await cluster.close()

    return asyncio.run(main())


def test_methods_of_the_surface_run_in_the_worker():
    async def test(client):
        await client.started()
        return await client.add(1), await client.add(1, 2), await client.add(left=1, right=3)

    assert with_worker(test) == (11, 3, 4)


def test_calls_run_beside_each_other():
    async def test(client):
        await client.started()
        waiting = asyncio.ensure_future(client.wait_for_open())
        assert await client.open() == "opened here"
        return await waiting

    assert with_worker(test) == "open"


def test_an_error_of_a_call_keeps_type_and_fields():
    async def test(client):
        await client.started()
        with pytest.raises(DataError) as error:
            await client.fail()
        assert error.value.path == "a.json"
        assert await client.add(1) == 11, "the worker goes on"

    with_worker(test)


def test_the_death_of_a_worker_fails_all_calls():
    async def test(client):
        for failing in (client.started(), client.died()):
            with pytest.raises(WorkerDiedError):
                await failing

    with_worker(test, "BrokenWorker")


def test_a_worker_is_killed_if_its_start_is_given_up():
    async def test(client):
        starting = asyncio.ensure_future(client.started_or_killed())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(WorkerDiedError):
            await client.died()

    with_worker(test, "SilentWorker", debug=False)


def test_a_cancelled_call_gives_up_what_it_has_asked():
    asked, given_up = asyncio.Event(), asyncio.Event()

    async def reply(answer):
        if answer is not None:
            return answer
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            given_up.set()
            raise

    async def test(client):
        call = asyncio.ensure_future(client.call("ask", None))
        await asked.wait()
        call.cancel()
        await asyncio.wait_for(given_up.wait(), 10)
        return await client.call("ask", "the worker goes on")

    assert with_worker(test, "AskingWorker", reply=reply) == "the worker goes on"


def test_any_error_of_an_answer_goes_to_whoever_asked():
    async def reply(kind):
        if kind == "died":
            raise WorkerDiedError("all judges are gone")
        raise RuntimeError("nobody expected this")

    async def test(client):
        with pytest.raises(WorkerDiedError, match="all judges"):
            await client.call("ask", "died")
        with pytest.raises(WorkerDiedError, match="nobody expected this"):
            await asyncio.wait_for(client.call("ask", "other"), 10)

    with_worker(test, "AskingWorker", reply=reply)
