"""Which rollout worker an attempt goes to, and where it goes when that one is gone."""

import asyncio
import itertools

import pytest

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import WorkerDied
from antiphon.core.types import AttemptId, PolicyVersion, Prompt
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.remote_workers import RolloutWorker, RolloutWorkers

FACTORY = "tests.unit.rollout.sharding_worker:Answers"
NOW = PolicyVersion(0, 0)


def with_shards(test, engines=(1, 1), **config):
    """Run a test with workers that have so many engines, in threads; returns what was told of losses."""
    told = []

    async def body():
        cluster, serials = LocalCluster(ClusterConfig(debug=True)), itertools.count()

        async def start(number):
            serial = next(serials)
            shard = RolloutWorker(
                cluster.spawn(f"w{serial}", FACTORY, serial, engines[number]), number, Events(), told.append
            )
            await shard.started()
            return shard

        made = [await start(number) for number in range(len(engines))]
        schedule = RolloutConfig(groups_per_step=1, sampling={"max_tokens": 1}, **config)
        try:
            shards = RolloutWorkers(made, Deadlines(), schedule, start=start, on_loss=told.append)
            await asyncio.wait_for(test(shards, made), 60)
        finally:
            await cluster.close()

    asyncio.run(body())
    return told


def play(shards, group, sibling, prompt="go"):
    run = shards.run(Prompt(id=prompt, task="t", messages=()), AttemptId(group, sibling, 0), NOW)
    return asyncio.ensure_future(run)


async def nothing(shard):
    """The newest weights."""


async def staying(shards, *groups):
    """Attempts at these groups that do not end."""
    tasks = [play(shards, group, number, "stay") for number, group in enumerate(groups)]
    await asyncio.sleep(0)
    return tasks


def test_a_group_stays_together_and_others_go_where_the_fewest_attempts_an_engine_are():
    async def body(shards, made):
        assert (await play(shards, 0, 0))[0] == 0
        open_ = await staying(shards, 1, 1, 1)  # worker 0 has one engine, worker 1 three
        assert (await play(shards, 1, 3))[0] == 0
        open_ += await staying(shards, *range(2, 10))
        assert (await play(shards, 10, 0))[0] == 1, "8 attempts on three engines are fewer than 3 on one"
        open_ += await staying(shards, 11)
        assert (await play(shards, 12, 0))[0] == 0, "9 are not"
        for task in open_:
            task.cancel()
        await asyncio.wait(open_)
        assert await play(shards, 13, 0) == (0, AttemptId(13, 0, 0), 3), "what the controller cancels ends there"

    with_shards(body, engines=(1, 3))


def test_attempts_of_a_worker_that_dies_begin_again_as_themselves():
    async def body(shards, made):
        refreshed = asyncio.Queue()
        watch = asyncio.ensure_future(shards.watch(refreshed.put))
        played = play(shards, 0, 0, "stay on 0")
        await asyncio.sleep(0)
        made[0].kill()
        assert (await played)[:2] == (1, AttemptId(0, 0, 0))
        assert (await refreshed.get()).number == 0, "another has its engines, and asks for weights"
        assert shards.engines == 2
        watch.cancel()

    assert with_shards(body) == ["worker w0 was given up; rollout workers left: 1"]


@pytest.mark.parametrize(("prompt", "end"), [("hang", "did not answer for 0.2 s"), ("die", "this was too much")])
def test_an_attempt_that_takes_every_worker_along_ends_the_run(prompt, end):
    async def body(shards, made):
        watch = asyncio.ensure_future(shards.watch(nothing))
        with pytest.raises(WorkerDied):
            await play(shards, 0, 0, prompt)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)

    told = with_shards(body, engines=(1,), engine_timeout=0.2, engine_restarts=2)
    assert [end in each for each in told] == [True] * 3, "it, and two that took its place"
