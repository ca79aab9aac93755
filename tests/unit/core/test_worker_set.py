"""Workers that share calls, lost and replaced in virtual time; their handles are in this process."""

import asyncio
from collections import Counter

import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, StallError, WorkerDiedError
from antiphon.core.rpc import STARTED, Client, Reply
from antiphon.core.worker_set import QUICK_DEATHS, RETRY_SECONDS, DeadlyCallError, WorkerSet
from antiphon.simulate.clock import run

SILENCE, PATIENCE = 10.0, 100.0


class Handle:
    """A worker that takes ten seconds for each call, any number of them at once."""

    def __init__(self, name):
        self.name = name
        self.calls = []
        self.hangs = False
        self.dead = False
        self.ended = asyncio.Event()

    def send(self, method, *args):
        if self.dead:
            raise WorkerDiedError(f"{self.name} is dead")
        if method == "start":
            self.reply(Reply("result", STARTED, None, None))
        elif method == "begin_call":
            key, called, _ = args
            self.calls.append(called)
            if not self.hangs:
                seconds = 0.0 if called == "health" else 10.0
                asyncio.get_running_loop().call_later(seconds, self.reply, Reply("result", key, self.name, None))

    def reply(self, reply):
        if not self.dead:
            asyncio.get_running_loop().call_soon(self.heard, reply)

    def on_event(self, callback):
        self.heard = callback

    def on_death(self, callback):
        self.mourners = [callback]

    def kill(self):
        if not self.dead:
            self.dead = True
            self.mourners[0](WorkerDiedError(f"{self.name} was killed"))

    async def close(self):
        self.kill()


class Workers:
    """Starts workers, or does not."""

    def __init__(self):
        self.started = []
        self.error = None
        self.told = []

    async def start(self, number):
        if self.error is not None:
            raise self.error
        self.started.append(Handle(f"worker {len(self.started)} at {number}"))
        return Client(self.started[-1])

    def set_of(self, count):
        return WorkerSet(
            "helpers", self.start, count, Deadlines(), self.told.append, silence=SILENCE, patience=PATIENCE
        )


def in_time(test, count=2):
    async def main():
        workers = Workers()
        async with workers.set_of(count) as group:
            return await test(workers, group)

    return run(main())


def test_each_call_goes_to_the_worker_with_the_fewest():
    async def test(workers, group):
        return Counter(await asyncio.gather(*(group.call("work") for _ in range(9))))

    assert in_time(test, count=3) == {"worker 0 at 0": 3, "worker 1 at 1": 3, "worker 2 at 2": 3}


def test_calls_of_a_dead_worker_go_to_others_and_another_takes_its_place():
    async def test(workers, group):
        asked = [asyncio.ensure_future(group.call("work")) for _ in range(4)]
        await asyncio.sleep(4)
        workers.started[0].kill()
        answers = Counter(await asyncio.gather(*asked))
        assert answers == {"worker 1 at 1": 2, "worker 2 at 0": 2} or answers == {"worker 1 at 1": 4}
        assert workers.told == ["worker 0 at 0 was killed; helpers left: 1"]
        return Counter(await asyncio.gather(*(group.call("work") for _ in range(4))))

    assert in_time(test) == {"worker 1 at 1": 2, "worker 2 at 0": 2}


def test_a_call_that_kills_its_workers_is_given_up():
    async def test(workers, group):
        asked = asyncio.ensure_future(group.call("work"))
        for _ in range(2):
            await asyncio.sleep(4)
            next(each for each in workers.started if not each.dead and "work" in each.calls).kill()
        with pytest.raises(DeadlyCallError, match="2 of the helpers were lost at one call of work"):
            await asked
        return await group.call("work")

    assert "worker" in in_time(test), "the others go on"


def test_silent_worker_is_killed():
    async def test(workers, group):
        workers.started[0].hangs = True
        began = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(group.call("work") for _ in range(2)))
        assert workers.started[0].dead and asyncio.get_running_loop().time() - began <= 1.25 * SILENCE + 10.0
        return answers

    assert all("worker 0" not in answer for answer in in_time(test))


def test_worker_that_cannot_be_started_again_is_tried_until_it_can():
    async def test(workers, group):
        workers.error = WorkerDiedError("nowhere to run")
        workers.started[0].kill()
        await asyncio.sleep(1000)
        assert len(group.alive) == 1 and len(workers.told) > 1000 / RETRY_SECONDS[1]
        workers.error = None
        await asyncio.sleep(RETRY_SECONDS[1])
        return len(group.alive)

    assert in_time(test) == 2


def test_call_without_workers_waits_and_then_says_for_whom():
    async def test(workers, group):
        workers.error = WorkerDiedError("nowhere to run")
        workers.started[0].kill()
        with pytest.raises(StallError, match="helpers"):
            await group.call("work")
        workers.error = None
        return await group.call("work")

    assert in_time(test, count=1) == "worker 1 at 0"


def test_workers_that_die_one_after_the_other_end_the_set():
    async def test(workers, group):
        for death in range(QUICK_DEATHS):
            while len(workers.started) == death:
                await asyncio.sleep(RETRY_SECONDS[0])
            workers.started[-1].kill()
            await asyncio.sleep(RETRY_SECONDS[0])
        with pytest.raises(WorkerDiedError, match="was killed"):
            await group.call("work")
        return len(workers.started)

    assert in_time(test, count=1) == QUICK_DEATHS


def test_mistake_that_shows_at_a_restart_ends_the_set():
    async def test(workers, group):
        workers.error = ConfigError("the reward is gone")
        workers.started[0].kill()
        with pytest.raises(ConfigError, match="gone"):
            await group.call("work")

    in_time(test, count=1)


def test_error_of_any_other_kind_ends_the_start_and_the_set():
    workers = Workers()
    workers.error = OSError("too many open files")

    async def start():
        async with workers.set_of(2):
            raise AssertionError("started")

    with pytest.raises(OSError, match="open files"):
        run(start())

    async def test(workers, group):
        workers.error = OSError("too many open files")
        workers.started[0].kill()
        with pytest.raises(OSError, match="open files"):
            await group.call("work")

    in_time(test, count=1)


def test_call_to_all_waits_for_one_if_there_is_none():
    async def test(workers, group):
        workers.error = WorkerDiedError("nowhere to run")
        workers.started[0].kill()
        await asyncio.sleep(1)
        assert not group.alive
        workers.error = None
        return await group.call_all("work")

    assert in_time(test, count=1) == ["worker 1 at 0"]


def test_close_fails_calls_that_wait_for_a_worker():
    async def test(workers, group):
        workers.error = WorkerDiedError("nowhere to run")
        workers.started[0].kill()
        waiting = asyncio.ensure_future(group.call("work"))
        await asyncio.sleep(1)
        await group.close()
        began = asyncio.get_running_loop().time()
        with pytest.raises(WorkerDiedError, match="closed"):
            await waiting
        return asyncio.get_running_loop().time() - began

    assert in_time(test, count=1) == 0


def test_first_start_must_succeed_and_leaves_nothing():
    workers = Workers()

    async def main():
        workers.start = starts_once(workers)
        async with workers.set_of(2):
            raise AssertionError("started")

    with pytest.raises(ConfigError, match="second"):
        run(main())
    assert all(handle.dead for handle in workers.started)


def starts_once(workers):
    start = workers.start

    async def once(number):
        if number:
            await asyncio.sleep(1)
            raise ConfigError("the second cannot be built")
        return await start(number)

    return once
