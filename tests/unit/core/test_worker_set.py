"""Workers that share calls, lost and replaced in virtual time; their handles are in this process."""

import asyncio
from collections import Counter

import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, StallError, WorkerDiedError
from antiphon.core.rpc import STARTED, AnswererDiedError, Client, Reply
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

    def set_of(self, count, **options):
        return WorkerSet(
            "helpers", self.start, count, Deadlines(), self.told.append, silence=SILENCE, patience=PATIENCE, **options
        )


def in_time(test, count=2, **options):
    async def main():
        workers = Workers()
        async with workers.set_of(count, **options) as group:
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


async def kill_newest(workers):
    """Kill the worker that started last; return when its end has been seen to."""
    workers.started[-1].kill()
    await asyncio.sleep(2 * RETRY_SECONDS[1])


def test_no_more_workers_are_replaced_than_there_are_restarts():
    async def test(workers, group):
        for _ in range(4):
            await kill_newest(workers)
        assert len(group.alive) == 1 and len(workers.started) == 2 + 2, "the first goes on alone"
        end = asyncio.ensure_future(group.raise_end())
        assert await group.call("work") == "worker 0 at 0" and not end.done()
        workers.started[0].kill()
        with pytest.raises(WorkerDiedError, match="worker 0 at 0 was killed"):
            await group.call("work")
        with pytest.raises(WorkerDiedError, match="worker 0 at 0 was killed"):
            await end

    in_time(test, restarts=2)


def test_starts_that_fail_cost_no_restart_while_others_live():
    async def test(workers, group):
        workers.error = WorkerDiedError("nowhere to run")
        workers.started[0].kill()
        await asyncio.sleep(100)
        assert sum("takes the place" in each for each in workers.told) > 5
        workers.error = None
        await asyncio.sleep(RETRY_SECONDS[1])
        assert len(group.alive) == 2
        await kill_newest(workers)
        return len(group.alive)

    assert in_time(test, restarts=1) == 1, "the one restart is used up by the start that succeeded"


def test_starts_that_fail_without_workers_use_up_the_restarts():
    async def test(workers, group):
        workers.error = WorkerDiedError("nowhere to run")
        for handle in workers.started:
            handle.kill()
        with pytest.raises(WorkerDiedError, match="nowhere"):
            await group.raise_end()
        return sum("takes the place" in each for each in workers.told)

    assert 3 <= in_time(test, restarts=3) <= 4, "the first of them may be tried before the second worker's end is known"


def test_set_goes_on_while_the_last_replacement_starts():
    async def test(workers, group):
        start = workers.start

        async def slowly(number):
            await asyncio.sleep(50)
            return await start(number)

        group._start = slowly
        for handle in list(workers.started):
            handle.kill()
            await asyncio.sleep(1)
        return await group.call("work")

    assert in_time(test, restarts=1) == "worker 2 at 0"


def test_worker_that_still_starts_counts_as_one_that_comes():
    """One dies while the other has not started for the first time."""

    async def main():
        workers = Workers()
        start = workers.start

        async def slowly(number):
            await asyncio.sleep(20.0 * number)
            return await start(number)

        workers.start = slowly
        group = workers.set_of(2, restarts=0)
        entering = asyncio.ensure_future(group.__aenter__())
        await asyncio.sleep(5)
        workers.started[0].kill()
        await entering
        answer = await group.call("work")
        await group.close()
        return answer

    assert run(main()) == "worker 1 at 1"


def test_a_call_is_tried_on_every_worker_if_restarts_are_counted():
    async def test(workers, group):
        asked = asyncio.ensure_future(group.call("work"))
        for _ in range(3):
            await asyncio.sleep(4)
            next(each for each in workers.started if not each.dead and "work" in each.calls).kill()
        return await asked

    assert "worker" in in_time(test, restarts=3)


def test_what_is_lost_is_told_with_what_took_its_place():
    replaced = []

    async def test(workers, group):
        lost = group.latest[1]
        workers.started[1].kill()
        assert lost in group.latest, "until another one is there"
        await asyncio.sleep(1)
        assert replaced == [(group.latest[1], lost)] and lost not in group.latest

    in_time(test, on_replaced=lambda *pair: replaced.append(pair))


def test_work_goes_where_it_costs_least():
    async def test(workers, group):
        work = (lambda worker: worker.call("work"), "some work", lambda worker: -group.alive.index(worker))
        return await asyncio.gather(*(group.use(*work) for _ in range(3)))

    assert in_time(test) == ["worker 1 at 1"] * 3


def test_worker_whose_client_lost_what_it_asked_for_lives_on():
    async def test(workers, group):
        async def ask(worker):
            raise AnswererDiedError("the judge is gone")

        with pytest.raises(AnswererDiedError):
            await group.use(ask, "a question")
        return len(group.alive), workers.told

    assert in_time(test) == (2, [])


def test_close_ends_a_start_that_hangs():
    async def main():
        workers = Workers()
        workers.start = lambda number: asyncio.Event().wait()
        group = workers.set_of(2)
        entering = asyncio.ensure_future(group.__aenter__())
        await asyncio.sleep(1)
        await group.close()
        with pytest.raises(WorkerDiedError, match="closed"):
            await entering
        return asyncio.get_running_loop().time()

    assert run(main()) < PATIENCE


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
