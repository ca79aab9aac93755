"""Every wait has a name, an owner and a deadline."""

import asyncio

import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import StallError


def test_the_result_passes_through():
    async def run():
        deadlines = Deadlines()
        future = asyncio.get_running_loop().create_future()
        future.set_result(7)
        return await deadlines.wait(future, name="n", owner="o", on="x", deadline=60), deadlines.open()

    assert asyncio.run(run()) == (7, [])


def test_a_stall_names_the_waiter_and_everybody_else():
    async def run():
        deadlines = Deadlines()
        never = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            other = tasks.create_task(
                deadlines.wait(never.wait(), name="weights", owner="engine 0", on="learner", deadline=1e6)
            )
            await asyncio.sleep(0)
            try:
                with pytest.raises(StallError) as stall:
                    await deadlines.wait(never.wait(), name="groups", owner="learner", on="rollout", deadline=0.001)
            finally:
                other.cancel()
        return str(stall.value), deadlines.open()

    message, still_open = asyncio.run(run())
    assert message.startswith("learner waited more than 0.001 s for rollout (groups)")
    assert "engine 0 waits for learner (weights) since" in message
    assert "learner waits for rollout (groups) since" in message
    assert still_open == []


def test_a_timeout_of_what_is_awaited_is_no_stall():
    async def broken():
        raise TimeoutError("the socket's own")

    async def run():
        await Deadlines().wait(broken(), name="n", owner="o", on="x", deadline=60)

    with pytest.raises(TimeoutError, match="the socket's own"):
        asyncio.run(run())


def test_errors_and_cancellation_close_the_wait():
    async def run():
        deadlines = Deadlines()

        async def broken():
            raise KeyError("x")

        with pytest.raises(KeyError):
            await deadlines.wait(broken(), name="n", owner="o", on="x", deadline=60)
        task = asyncio.create_task(deadlines.wait(asyncio.Event().wait(), name="n", owner="o", on="x", deadline=60))
        await asyncio.sleep(0)
        assert [wait.on for wait in deadlines.open()] == ["x"]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return deadlines.open()

    assert asyncio.run(run()) == []


def test_time_spent_is_kept_by_owner_and_name():
    async def run():
        deadlines = Deadlines()
        loop = asyncio.get_running_loop()
        before = loop.time()
        for _ in range(3):
            await deadlines.wait(asyncio.sleep(0.001), name="groups", owner="learner", on="rollout", deadline=60)
        return deadlines.spent("learner", "groups"), loop.time() - before, deadlines.spent("learner", "weights")

    spent, elapsed, other = asyncio.run(run())
    assert 0 < spent <= elapsed
    assert other == 0


def test_a_table_of_no_waits_says_so():
    assert Deadlines().table(0.0).strip() == "nobody"


def test_calm_comes_when_only_the_patient_wait():
    async def run():
        deadlines, order, work, patience = Deadlines(), [], asyncio.Event(), asyncio.Event()

        async def worker():
            await deadlines.wait(work.wait(), name="step", owner="a", on="x", deadline=60)
            for _ in range(5):  # it goes on for a few turns of the loop, between two waits
                await asyncio.sleep(0)
            order.append("worked")
            await deadlines.wait(patience.wait(), name="queue", owner="a", on="x", deadline=60)

        async def onlooker():
            await deadlines.quiesce("queue")
            order.append("calm")
            patience.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(onlooker())
            tasks.create_task(worker())
            await asyncio.sleep(0)
            work.set()
        return order

    assert asyncio.run(run()) == ["worked", "calm"]
