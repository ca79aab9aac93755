"""Which rollout worker an attempt goes to, and where it goes when that one is gone."""

import asyncio
import io
import itertools
import json
from itertools import pairwise

import pytest

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import WorkerDiedError
from antiphon.core.rpc import Reply
from antiphon.core.types import AttemptId, PolicyVersion, Prompt, WeightsUpdate
from antiphon.core.worker_set import RETRY_SECONDS
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.remote_workers import Counts, RolloutWorker, RolloutWorkers
from antiphon.simulate import clock

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

        schedule = RolloutConfig(groups_per_step=1, sampling={"max_tokens": 1}, workers=len(engines), **config)
        shards = RolloutWorkers(start, Deadlines(), schedule, report=told.append)
        try:
            await shards.start()
            made = sorted(shards._workers.alive, key=lambda worker: worker.number)
            await asyncio.wait_for(test(shards, made), 60)
        finally:
            await shards.close()
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


def test_groups_stay_together_and_go_where_load_is_least():
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


def test_attempts_of_a_dead_worker_restart_with_their_ids():
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

    assert with_shards(body) == ["worker w0 was abandoned; rollout workers left: 1"]


@pytest.mark.parametrize(("prompt", "end"), [("hang", "did not answer for 0.2 s"), ("die", "this was too much")])
def test_an_attempt_that_takes_every_worker_along_ends_the_run(prompt, end):
    async def body(shards, made):
        watch = asyncio.ensure_future(shards.watch(nothing))
        with pytest.raises(WorkerDiedError):
            await play(shards, 0, 0, prompt)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)

    told = with_shards(body, engines=(1,), engine_timeout=0.2, engine_restarts=2)
    assert [end in each for each in told] == [True] * 3, "it, and two that took its place"


def test_a_judge_that_is_gone_takes_no_worker_along():
    """All workers ask the same one: to replace them, one after another, would help nobody."""

    async def judge(attempt):
        if attempt.group:
            raise WorkerDiedError("the judge is gone")
        return "right"

    async def body():
        cluster, told = LocalCluster(ClusterConfig(debug=True)), []

        async def start(number):
            handle = cluster.spawn(f"w{number}", "tests.unit.rollout.sharding_worker:Asks")
            worker = RolloutWorker(handle, number, Events(), told.append, {"judge": judge})
            await worker.started()
            return worker

        schedule = RolloutConfig(groups_per_step=1, sampling={"max_tokens": 1}, workers=2)
        shards = RolloutWorkers(start, Deadlines(), schedule, report=told.append)
        try:
            await shards.start()
            with pytest.raises(WorkerDiedError, match="the judge is gone"):
                await play(shards, 1, 0)
            assert [await play(shards, 0, number) for number in range(2)] == ["right"] * 2
            return told
        finally:
            await shards.close()
            await cluster.close()

    assert asyncio.run(asyncio.wait_for(body(), 60)) == []


class Handle:
    """A worker that says what the test says, and notes what it is sent."""

    name = "w"

    def __init__(self):
        self.sent = []

    def on_event(self, callback):
        self.say = callback

    def on_death(self, callback):
        self.bury = callback

    def send(self, method, *args):
        self.sent.append((method, *args))

    def kill(self):
        self.sent.append("kill")

    async def close(self):
        self.sent.append("close")


def with_handles(test, count, **config):
    async def body():
        handles, told, sink = [Handle() for _ in range(count)], [], io.StringIO()
        events = Events(sink=sink)
        made = [RolloutWorker(handle, number, events, told.append) for number, handle in enumerate(handles)]
        waiting = list(reversed(made))

        async def start(number):
            return waiting.pop() if waiting else await asyncio.Event().wait()  # nobody comes in place of a lost one

        schedule = RolloutConfig(groups_per_step=1, sampling={"max_tokens": 1}, workers=count, **config)
        shards = RolloutWorkers(start, Deadlines(), schedule, report=told.append)
        await shards.start()
        await asyncio.wait_for(test(shards, made, handles), 60)
        await shards.close()
        lines = [json.loads(line) for line in sink.getvalue().splitlines()]
        return told, [(line["event"], line.get("engine")) for line in lines]

    return asyncio.run(body())


def word(kind, value=None, **counts):
    return Reply(kind, 0, value, Counts(**counts))


def test_what_workers_say_of_their_pools_is_added_up():
    async def body(shards, made, handles):
        handles[0].say(word("message", "hello", version=3, engines=2, generated_tokens=10, requeued_tokens=1))
        handles[1].say(word("stale", version=2, engines=1, generated_tokens=5, requeued_tokens=4))
        assert [shard.version for shard in made] == [3, 2]
        assert (shards.engines, shards.generated_tokens, shards.requeued_tokens) == (3, 15, 5)
        made[1].open["7"] += 4
        loads = shards.describe_load().engines
        assert [(load.running, load.version) for load in loads] == [(0, 3), (4, 2)]
        refreshed = asyncio.Queue()
        watch = asyncio.ensure_future(shards.watch(refreshed.put))
        assert await refreshed.get() is made[1]
        handles[0].bury(WorkerDiedError("gone"))
        while shards.engines == 3:
            await asyncio.sleep(0)
        assert (shards.engines, shards.generated_tokens) == (1, 15), "what the dead made is made"
        watch.cancel()

    told, _ = with_handles(body, 2)
    assert told == ["hello", "gone; rollout workers left: 1"]


def test_engines_of_a_worker_that_is_killed_are_lost_with_it():
    async def body(shards, made, handles):
        for engine in (4, 2, 7):
            handles[0].say(word("event", ("join", {"engine": engine})))
        handles[0].say(word("event", ("retired", {"engine": 4})))
        made[0].kill()
        made[0].kill()
        assert "kill" in handles[0].sent

    _, noted = with_handles(body, 1)
    assert noted == [("join", 4), ("join", 2), ("join", 7), ("retired", 4), ("lost", 2), ("lost", 7)]


def test_requests_of_attempts_that_nobody_needs_are_not_noted():
    async def body(shards, made, handles):
        made[0].open["5"] = 1
        for group in ("5", "6"):
            handles[0].say(word("event", ("place", {"request": f"{group}.0.0/0", "engine": 1})))

    assert with_handles(body, 1)[1] == [("place", 1)]


@pytest.mark.parametrize("method", ["release_devices", "reclaim_engines", "load"])
def test_all_workers_are_asked_and_a_dead_one_is_done_without(method):
    async def body(shards, made, handles):
        args = (WeightsUpdate(version=1, location="", manifest=None), "keep") if method == "load" else ()
        asked = asyncio.ensure_future(getattr(shards, method)(*args))
        while len(handles[1].sent) < 2:
            await asyncio.sleep(0)
        assert [handle.sent[1:] for handle in handles] == [[("begin_call", 1, method, args)]] * 2
        handles[0].bury(WorkerDiedError("gone"))
        handles[1].say(Reply("result", 1, None, Counts(engines=1)))
        await asked
        assert shards.engines == 1

    assert with_handles(body, 2)[0] == ["gone; rollout workers left: 1"]


class Willing(Handle):
    """A worker that answers all it is asked, until it dies."""

    dead = False

    def die(self):
        self.dead = True
        self.bury(WorkerDiedError("gone"))

    def send(self, method, *args):
        if self.dead:
            raise WorkerDiedError("gone")
        super().send(method, *args)
        if method == "begin_call":
            word = Reply("result", args[0], None, Counts(engines=1))
            asyncio.get_running_loop().call_soon(lambda: self.say(word))


def asked(handle):
    return [sent[2] for sent in handle.sent if sent[0] == "begin_call" and sent[2] != "health"]


def replacing(refusals, before=()):
    """Lose one of two workers, after the calls `before`; returns when starts were tried, and what was asked of the third."""

    async def body():
        loop, tries, third, told = asyncio.get_running_loop(), [], Willing(), []
        handles = [Willing(), Willing()]

        first = iter(handles)

        async def start(number):
            if (handle := next(first, None)) is not None:
                return RolloutWorker(handle, number, Events(), told.append)
            tries.append(loop.time())
            if len(tries) <= refusals:
                raise WorkerDiedError("no room")
            return RolloutWorker(third, number, Events(), told.append)

        schedule = RolloutConfig(groups_per_step=1, sampling={"max_tokens": 1}, engine_restarts=1, workers=2)
        shards = RolloutWorkers(start, Deadlines(), schedule, report=told.append)
        await shards.start()
        for method in before:
            await getattr(shards, method)()
        refreshed = asyncio.Queue()
        watch = asyncio.ensure_future(shards.watch(refreshed.put))
        await asyncio.sleep(0)
        handles[0].say(word("message", "hello", engines=1, generated_tokens=5, requeued_tokens=1))
        handles[0].die()
        shard = await asyncio.wait_for(refreshed.get(), 10_000)
        assert shard.number == 0 and len(told) == refusals + 2
        third.say(word("message", "hello", engines=1, generated_tokens=3, requeued_tokens=2))
        assert (shards.generated_tokens, shards.requeued_tokens) == (8, 3), "what the dead made is made"
        watch.cancel()
        await shards.close()
        return tries, asked(third)

    return clock.run(body())  # in virtual time


def test_worker_that_cannot_start_is_retried_with_backoff():
    tries, _ = replacing(refusals=9)
    first, most = RETRY_SECONDS
    assert [later - earlier for earlier, later in pairwise(tries)] == [min(first * 2**n, most) for n in range(9)]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ([], []),
        (["release_devices"], ["release_devices"]),
        (["release_devices", "reclaim_engines"], []),
        (["reclaim_engines"], []),
    ],
)
def test_worker_replaced_during_training_lends_its_devices(before, expected):
    assert replacing(0, before)[1] == expected
