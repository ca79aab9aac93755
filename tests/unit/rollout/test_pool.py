"""The engine pool places requests; the engines here answer when the test says so."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import WeightsError, WorkerDiedError
from antiphon.core.types import Completion, FinishReason, GenerateRequest, OnUpdate, Sampling, WeightsUpdate
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.engine_supervisor import EngineSupply, Scaling
from antiphon.rollout.pool import EnginePool
from antiphon.simulate import clock

SCHEDULE = RolloutConfig(groups_per_step=1, timeout=30, sampling={"max_tokens": 8})


class HeldGeneration:
    """A request that ends when told."""

    def __init__(self, request):
        self.request = request
        self.aborted = False
        self.done = asyncio.get_running_loop().create_future()

    async def result(self):
        return await self.done

    def abort(self):
        self.aborted = True

    def partial(self):
        return completion([7], FinishReason.ABORT)

    def die(self):
        self.done.set_exception(WorkerDiedError("the engine was killed"))

    def finish(self):
        self.done.set_result(completion([0, 0], FinishReason.STOP))


def completion(tokens, finish):
    return Completion(
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        finish=finish,
    )


class HeldEngine:
    """An engine with `capacity` slots that is slow to load."""

    def __init__(self, capacity=4, device=""):
        self.capacity = capacity
        self.device = device
        self.version = 0
        self.started: list[HeldGeneration] = []
        self.may_load = asyncio.Event()
        self.refuses = self.dead = self.colocated = self.asleep = False

    def start(self, request):
        self.started.append(HeldGeneration(request))
        return self.started[-1]

    async def load(self, update, mode):
        await self.may_load.wait()
        if self.refuses:
            raise WeightsError("a wrong digest")
        self.version = update.version

    async def sleep(self):
        self.asleep = True

    async def wake(self):
        self.asleep = False

    async def health(self):
        if self.dead:
            raise WorkerDiedError("the engine was killed")

    def kill(self):
        self.dead = True


def request(name, **changes):
    return GenerateRequest(id=name, tokens=np.array([1], np.int32), sampling=Sampling(max_tokens=4), **changes)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def pool_of(*engines):
    return EnginePool(engines, Deadlines(), SCHEDULE, events=Events())


def test_requests_wait_for_room_and_go_by_priority():
    async def main():
        engine = HeldEngine(capacity=4)
        pool = pool_of(engine)
        tasks = [asyncio.create_task(pool.generate(request(f"r{i}"))) for i in range(6)]
        await settle()
        urgent = asyncio.create_task(pool.generate(request("urgent", priority=-1)))
        await settle()
        assert [g.request.id for g in engine.started] == ["r0", "r1", "r2", "r3", "r4"]
        engine.started[0].finish()
        await settle()
        assert engine.started[-1].request.id == "urgent"
        for generation in engine.started[1:]:
            generation.finish()
        await settle()
        engine.started[-1].finish()
        await asyncio.gather(urgent, *tasks)
        assert pool.generated_tokens == 14

    asyncio.run(main())


def test_load_is_spread_and_siblings_stay_together():
    async def main():
        one, two = HeldEngine(), HeldEngine()
        pool = pool_of(one, two)
        tasks = []
        for name in ("a", "b", "a", "b"):
            tasks.append(asyncio.create_task(pool.generate(request(f"{name}{len(tasks)}", affinity=(name,)))))
            await settle()
        assert [g.request.affinity for g in one.started] == [("a",), ("a",)]
        assert [g.request.affinity for g in two.started] == [("b",), ("b",)]

    asyncio.run(main())


def test_a_conversation_stays_where_its_turns_are():
    async def main():
        one, two = HeldEngine(), HeldEngine()
        pool = pool_of(one, two)

        async def turn(attempt, number):
            name = f"0.{attempt}.0"
            return await pool.generate(request(f"{name}/{number}", affinity=(name, "0")))

        first = [asyncio.create_task(turn(attempt, 0)) for attempt in range(2)]
        await settle()
        began = [engine.started[0].request.affinity[0] for engine in (one, two)]
        assert sorted(began) == ["0.0.0", "0.1.0"], "siblings are spread"
        for engine in (one, two):
            engine.started[0].finish()
        await asyncio.gather(*first)
        second = [asyncio.create_task(turn(attempt, 1)) for attempt in (1, 0)]
        await settle()
        assert [engine.started[1].request.affinity[0] for engine in (one, two)] == began
        for engine in (one, two):
            engine.started[1].finish()
        await asyncio.gather(*second)

    asyncio.run(main())


def test_request_goes_only_to_engines_with_its_version():
    async def main():
        one, two = HeldEngine(), HeldEngine()
        pool = pool_of(one, two)
        loading = asyncio.create_task(pool.load(WeightsUpdate(version=1, location="", manifest=None), OnUpdate.KEEP))
        fresh = asyncio.create_task(pool.generate(request("fresh", min_version=1)))
        old = asyncio.create_task(pool.generate(request("old")))
        await settle()
        assert [g.request.id for g in one.started + two.started] == ["old"]
        two.may_load.set()
        await settle()
        assert [g.request.id for g in two.started] == ["fresh"], "the slow engine delays itself only"
        assert not loading.done()
        one.may_load.set()
        await loading
        for generation in one.started + two.started:
            generation.finish()
        await asyncio.gather(fresh, old)

    asyncio.run(main())


def test_request_waiting_for_a_version_keeps_its_place():
    async def main():
        engine = HeldEngine(capacity=1)
        pool = pool_of(engine)
        loading = asyncio.create_task(pool.load(WeightsUpdate(version=1, location="", manifest=None), OnUpdate.KEEP))
        versions = {"new": 1, "old": 0, "newer": 1, "older": 0}
        tasks = [asyncio.create_task(pool.generate(request(n, min_version=v))) for n, v in versions.items()]
        await settle()
        assert [g.request.id for g in engine.started] == ["old", "older"], "the engine has nothing newer"
        engine.may_load.set()
        await loading
        for finished in range(len(tasks)):
            engine.started[finished].finish()
            await settle()
        assert [g.request.id for g in engine.started] == ["old", "older", "new", "newer"]
        await asyncio.gather(*tasks)

    asyncio.run(main())


@pytest.mark.parametrize("when", ["queued", "running"])
def test_cancelling_gives_the_place_back(when):
    async def main():
        engine = HeldEngine(capacity=1)
        pool = pool_of(engine)
        first = asyncio.create_task(pool.generate(request("first")))
        await settle()
        second = asyncio.create_task(pool.generate(request("second")))
        third = asyncio.create_task(pool.generate(request("third")))
        await settle()
        victim = second if when == "queued" else first
        running = len(engine.started)
        victim.cancel()
        await settle()
        assert victim.cancelled()
        if when == "running":
            assert engine.started[0].aborted
            assert len(engine.started) == running + 1
        for _ in range(3):
            for generation in engine.started:
                if not generation.done.done():
                    generation.finish()
            await settle()
        assert third.done() and not third.cancelled()
        assert {g.request.id for g in engine.started} >= {"first", "third"}

    asyncio.run(main())


def test_requests_of_a_dead_engine_keep_their_tokens():
    async def main():
        one, two = HeldEngine(), HeldEngine()
        told = []
        pool = EnginePool([one, two], Deadlines(), SCHEDULE, events=Events(), report_death=told.append)
        task = asyncio.create_task(pool.generate(request("a")))
        await settle()
        one.started[0].die()
        await settle()
        (again,) = two.started
        assert again.request.tokens.tolist() == [1, 7]
        assert (again.request.sampling.max_tokens, again.request.sampled) == (3, 1)
        again.finish()
        assert (await task).tokens.tolist() == [7, 0, 0]
        assert (pool.engines, pool.requeued_tokens, pool.generated_tokens) == (1, 1, 3)
        assert told == ["the engine was killed; engines left: 1"]

    asyncio.run(main())


def test_nothing_waits_for_an_engine_once_the_last_is_dead():
    async def main():
        engine = HeldEngine(capacity=1)
        pool = pool_of(engine)
        tasks = [asyncio.create_task(pool.generate(request(name))) for name in "abc"]
        await settle()
        engine.started[0].die()
        await settle()
        tasks.append(asyncio.create_task(pool.generate(request("late"))))
        engine.started[1].die()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [WorkerDiedError] * 4

    asyncio.run(main())


def test_loss_of_the_last_engine_ends_supervision():
    async def main():
        engine = HeldEngine()
        pool = pool_of(engine)
        watch = asyncio.create_task(pool.watch())
        asked = asyncio.create_task(pool.generate(request("a")))
        await settle()
        engine.started[0].die()
        await asyncio.wait([asked])  # who asked says nothing of it
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(watch, 600)
        assert isinstance(asked.exception(), WorkerDiedError) and raised.group_contains(WorkerDiedError)

    clock.run(main())  # in virtual time


def test_an_engine_more_and_an_engine_less_while_requests_run():
    async def main():
        one, two = HeldEngine(capacity=1), HeldEngine(capacity=1)
        pool = pool_of(one)
        tasks = [asyncio.create_task(pool.generate(request(name))) for name in "abc"]
        await settle()
        assert (len(one.started), len(two.started)) == (2, 0)
        pool.add(two)
        await settle()
        assert len(two.started) == 1
        leaving = asyncio.create_task(pool.retire(one))
        await settle()
        tasks.append(asyncio.create_task(pool.generate(request("d"))))
        await settle()
        assert (len(one.started), len(two.started), leaving.done()) == (2, 2, False)
        for generation in one.started:
            generation.finish()
        await leaving
        assert pool.engines == 1
        for generation in two.started:
            generation.finish()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_a_dead_engine_is_replaced_as_often_as_allowed():
    async def main():
        engines = [HeldEngine(), HeldEngine()]

        async def respawn():
            engines.append(HeldEngine())
            return engines[-1]

        schedule = SCHEDULE.model_copy(update={"engine_restarts": 2, "engine_timeout": 1.0})
        pool = EnginePool(engines[:2], Deadlines(), schedule, events=Events(), supply=EngineSupply(start=respawn))
        watch = asyncio.create_task(pool.watch())
        for victim, (made, alive) in enumerate([(3, 2), (4, 2), (4, 1)]):
            engines[victim].kill()
            await asyncio.sleep(2.0)
            assert (len(engines), pool.engines) == (made, alive)
        watch.cancel()

    clock.run(main())  # in virtual time


def test_late_engines_join_without_using_restarts():
    async def main():
        engines, there, told = [HeldEngine()], asyncio.Event(), []

        async def respawn():
            if not there.is_set():
                raise WorkerDiedError("its node has not come")
            engines.append(HeldEngine())
            return engines[-1]

        schedule = SCHEDULE.model_copy(update={"engine_restarts": 1, "engine_timeout": 1.0})
        pool = EnginePool(
            engines[:1],
            Deadlines(),
            schedule,
            events=Events(),
            report_death=told.append,
            supply=EngineSupply(start=respawn, target=3),
        )
        watch = asyncio.create_task(pool.watch())
        await asyncio.sleep(300.0)
        assert pool.engines == 1
        assert "its node has not come" in told[-1]
        there.set()
        await asyncio.sleep(60.0)
        assert pool.engines == 3
        for victim, alive in ((0, 3), (1, 2)):
            engines[victim].kill()
            await asyncio.sleep(2.0)
            assert pool.engines == alive
        watch.cancel()

    clock.run(main())  # in virtual time


class Scaled:
    """A pool of one to three engines of one slot, each of which goes after ten seconds without a request."""

    def __init__(self, restarts=0):
        self.engines, self.closed = [HeldEngine(capacity=1)], []
        self.pool = EnginePool(
            self.engines,
            Deadlines(),
            SCHEDULE.model_copy(update={"engine_restarts": restarts, "engine_timeout": 1.0, "timeout": 600.0}),
            events=Events(),
            supply=EngineSupply(start=self.another, scaling=Scaling(3, 10.0, self.close)),
        )
        self.watch = asyncio.create_task(self.pool.watch())
        self.names = map(str, itertools.count())

    async def another(self):
        await asyncio.sleep(1.0)
        self.engines.append(HeldEngine(capacity=1))
        return self.engines[-1]

    async def close(self, engine):
        self.closed.append(engine)

    async def ask(self, count):
        asked = [asyncio.create_task(self.pool.generate(request(next(self.names)))) for _ in range(count)]
        await settle()
        return asked

    async def answer(self):
        """All that is asked."""
        while held := [each for engine in self.engines for each in engine.started if not each.done.done()]:
            for each in held:
                each.finish()
            await settle()


def test_engines_scale_up_under_load_and_down_when_idle():
    async def main():
        scaled = Scaled()
        pool = scaled.pool
        await scaled.ask(1)
        await asyncio.sleep(60.0)
        assert (pool.engines, len(scaled.engines)) == (1, 1)  # it has a slot for that
        await scaled.ask(1)
        await asyncio.sleep(5.0)
        assert pool.engines == 2
        await scaled.ask(8)
        await asyncio.sleep(60.0)
        assert pool.engines == 3  # and no more
        await scaled.answer()
        await asyncio.sleep(9.0)
        await scaled.ask(1)
        await scaled.answer()
        await asyncio.sleep(9.0)
        assert pool.engines == 1 and len(scaled.closed) == 2  # but not the one that was asked since
        await asyncio.sleep(60.0)
        assert pool.engines == 1 and len({*scaled.closed}) == 2
        await scaled.ask(2)
        await asyncio.sleep(2.0)
        assert pool.engines == 2 and len(scaled.engines) == 4
        scaled.watch.cancel()

    clock.run(main())  # in virtual time


def test_one_engine_starts_at_a_time_and_none_for_what_is_over():
    async def main():
        scaled = Scaled()
        await scaled.ask(9)
        await asyncio.sleep(0.5)
        await scaled.answer()
        await asyncio.sleep(5.0)
        assert scaled.pool.engines == 2
        scaled.watch.cancel()

    clock.run(main())


@pytest.mark.parametrize("restarts", [0, 1])
def test_scaled_up_engine_is_replaced_like_any_other(restarts):
    async def main():
        scaled = Scaled(restarts)
        await scaled.ask(2)
        await asyncio.sleep(5.0)
        scaled.engines[1].kill()
        await asyncio.sleep(5.0)
        assert (scaled.pool.engines, len(scaled.engines)) == (1 + restarts, 2 + restarts)
        for engine in scaled.engines:
            engine.kill()
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(scaled.watch, 600)
        assert raised.group_contains(WorkerDiedError)

    clock.run(main())


def test_engines_that_sleep_while_others_train_are_not_idle():
    async def main():
        scaled = Scaled()
        pool = scaled.pool
        await scaled.ask(2)
        await asyncio.sleep(5.0)
        for engine in scaled.engines:
            engine.colocated = True
        await scaled.answer()
        await pool.sleep_colocated()
        waiting = await scaled.ask(2)  # for the engines to wake, and for no other
        await asyncio.sleep(60.0)
        assert pool.engines == len(scaled.engines) == 2
        await pool.wake_all()
        await settle()
        await scaled.answer()
        await asyncio.gather(*waiting)
        await asyncio.sleep(60.0)
        assert pool.engines == 1
        scaled.watch.cancel()

    clock.run(main())


def test_replacement_without_a_place_is_retried():
    """A node that left may come back; once nobody is left, there is no waiting for it."""

    async def main():
        engines, there, told = [HeldEngine(), HeldEngine()], asyncio.Event(), []

        async def respawn():
            if not there.is_set():
                raise WorkerDiedError("its node has left")
            engines.append(HeldEngine())
            return engines[-1]

        schedule = SCHEDULE.model_copy(update={"engine_restarts": 1, "engine_timeout": 1.0})
        pool = EnginePool(
            engines[:2],
            Deadlines(),
            schedule,
            events=Events(),
            supply=EngineSupply(start=respawn),
            report_death=told.append,
        )
        watch = asyncio.create_task(pool.watch())
        engines[0].kill()
        await asyncio.sleep(600.0)
        assert (len(engines), pool.engines) == (2, 1)
        assert 5 < sum("its node has left" in message for message in told) < 30
        there.set()
        await asyncio.sleep(60.0)
        assert (len(engines), pool.engines) == (3, 2)
        there.clear()
        for engine in engines:
            engine.kill()
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(watch, 600)
        assert raised.group_contains(WorkerDiedError)

    clock.run(main())


def test_replacement_that_hangs_while_starting_is_retried():
    async def main():
        engines, tries = [HeldEngine(), HeldEngine()], []

        async def respawn():
            tries.append(len(tries))
            if len(tries) == 1:
                await asyncio.Event().wait()
            engines.append(HeldEngine())
            return engines[-1]

        schedule = SCHEDULE.model_copy(update={"engine_restarts": 1, "engine_timeout": 1.0})
        pool = EnginePool(engines[:2], Deadlines(), schedule, events=Events(), supply=EngineSupply(start=respawn))
        watch = asyncio.create_task(pool.watch())
        engines[0].kill()
        await asyncio.sleep(2 * SCHEDULE.timeout)
        assert not watch.done() and pool.engines == len(tries) == 2
        watch.cancel()

    clock.run(main())


def test_an_engine_that_cannot_load_is_done_without():
    async def main():
        one, two = HeldEngine(), HeldEngine()
        one.refuses = True
        one.may_load.set()
        two.may_load.set()
        told = []
        pool = EnginePool([one, two], Deadlines(), SCHEDULE, events=Events(), report_death=told.append)
        await pool.load(WeightsUpdate(version=1, location="", manifest=None), OnUpdate.KEEP)
        assert one.dead and pool.engines == 1 and "a wrong digest" in told[0]

    asyncio.run(main())


class BlockedEngine(HeldEngine):
    """Answers nothing while it loads, as a worker does that has one thread."""

    async def health(self):
        if self.loading:
            await self.may_load.wait()
        await super().health()

    loading = False

    async def load(self, update, mode):
        self.loading = True
        await super().load(update, mode)
        self.loading = False


@pytest.mark.parametrize(("seconds", "lives"), [(100.0, True), (400.0, False)])
def test_loading_engine_may_be_silent_for_longer(seconds, lives):
    async def main():
        engine, other = BlockedEngine(), HeldEngine()
        other.may_load.set()
        schedule = SCHEDULE.model_copy(update={"engine_timeout": 1.0, "load_timeout": 300.0})
        pool = EnginePool([engine, other], Deadlines(), schedule, events=Events())
        watch = asyncio.create_task(pool.watch())
        loading = asyncio.create_task(pool.load(WeightsUpdate(version=1, location="", manifest=None), OnUpdate.KEEP))
        await asyncio.sleep(seconds)
        assert engine.dead is not lives and pool.engines == 1 + lives
        engine.may_load.set()
        await loading
        watch.cancel()

    clock.run(main())  # in virtual time


def test_pinned_group_goes_to_one_engine_with_room():
    async def main():
        one, two = HeldEngine(capacity=5), HeldEngine(capacity=5)
        schedule = SCHEDULE.model_copy(update={"placement": "pinned", "group_size": 3})
        pool = EnginePool([one, two], Deadlines(), schedule, events=Events())
        names = [f"{group}{i}" for group in "abcd" for i in range(3)]
        tasks = [asyncio.create_task(pool.generate(request(name, affinity=(name[0],)))) for name in names]
        await settle()
        assert [g.request.id for g in one.started] == ["a0", "a1", "a2"]
        assert [g.request.id for g in two.started] == ["b0", "b1", "b2"]
        one.started[0].finish()
        one.started[1].finish()
        await settle()
        assert len(one.started) == 3, "a group has its seats until its last sibling is done"
        one.started[2].finish()
        await settle()
        assert [g.request.id for g in one.started[3:]] == ["c0", "c1", "c2"]
        assert len(two.started) == 3
        while not all(task.done() for task in tasks):
            for generation in one.started + two.started:
                if not generation.done.done():
                    generation.finish()
            await settle()

    asyncio.run(main())


def test_the_first_to_load_does_not_take_what_is_meant_for_all():
    async def main():
        one, two = HeldEngine(capacity=8), HeldEngine(capacity=8)
        pool = pool_of(one, two)
        loading = asyncio.create_task(pool.load(WeightsUpdate(version=1, location="", manifest=None), OnUpdate.KEEP))
        fresh = [asyncio.create_task(pool.generate(request(str(i), affinity=("a",), min_version=1))) for i in range(6)]
        two.may_load.set()
        await settle()
        assert (len(one.started), len(two.started)) == (0, 3)
        one.may_load.set()
        await loading
        await settle()
        assert (len(one.started), len(two.started)) == (3, 3), "siblings too are spread"
        for generation in one.started + two.started:
            generation.finish()
        await asyncio.gather(*fresh)

    asyncio.run(main())


def test_a_request_whose_engine_died_at_its_last_token_is_done():
    async def main():
        one, two = HeldEngine(), HeldEngine()
        pool = pool_of(one, two)
        short = replace(request("a"), sampling=Sampling(max_tokens=1))
        task = asyncio.create_task(pool.generate(short))
        await settle()
        one.started[0].die()
        whole = await task
        assert (whole.tokens.tolist(), whole.finish, two.started) == ([7], FinishReason.LENGTH, [])

    asyncio.run(main())


def test_requests_of_a_colocated_engine_move_and_return():
    async def main():
        lent, kept = HeldEngine(capacity=2), HeldEngine(capacity=2)
        lent.colocated = True
        pool = EnginePool([lent, kept], Deadlines(), SCHEDULE, events=Events())
        tasks = [asyncio.create_task(pool.generate(request(str(number)))) for number in range(4)]
        await settle()
        assert (len(lent.started), len(kept.started)) == (2, 2)
        lending = asyncio.create_task(pool.sleep_colocated())
        await settle()
        assert all(generation.aborted for generation in lent.started)
        assert not lending.done(), "it sleeps once nothing runs"
        for generation in lent.started:
            generation.done.set_result(completion([7], FinishReason.ABORT))
        await lending
        assert (lent.asleep, pool.requeued_tokens) == (True, 2)
        for generation in kept.started[:2]:
            generation.finish()
        await settle()
        moved = kept.started[2:]
        assert [list(generation.request.tokens[-1:]) for generation in moved] == [[7], [7]]
        late = [asyncio.create_task(pool.generate(request(f"late {number}"))) for number in range(2)]
        await settle()
        assert len(lent.started) == 2, "nothing goes to an engine that sleeps"
        await pool.wake_all()
        await settle()
        assert not lent.asleep
        assert lent.started[2].request.id == "late 1", "the other engine has room for one"
        for generation in (*kept.started[2:], lent.started[2]):
            generation.finish()
        completions = await asyncio.gather(*tasks, *late)
        assert [len(completion.tokens) for completion in completions].count(3) == len(moved)

    clock.run(main())


def test_lent_engines_wake_with_the_weights_they_are_to_have():
    async def main():
        engine = HeldEngine()
        engine.colocated = True
        pool = EnginePool([engine], Deadlines(), SCHEDULE, events=Events())
        await pool.sleep_colocated()
        task = asyncio.create_task(pool.generate(request("0")))
        loading = asyncio.create_task(pool.load(WeightsUpdate(version=1, location="", manifest=None), OnUpdate.KEEP))
        await settle()
        assert engine.asleep
        assert not engine.started
        engine.may_load.set()
        await loading
        await settle()
        engine.started[0].finish()
        await task
        assert not engine.asleep

    clock.run(main())


def test_an_engine_that_joins_while_devices_are_lent_sleeps():
    async def main():
        pool = EnginePool([HeldEngine()], Deadlines(), SCHEDULE, events=Events())
        await pool.sleep_colocated()
        late = HeldEngine()
        late.colocated = True
        pool.add(late)
        tasks = [asyncio.create_task(pool.generate(request(str(number)))) for number in range(6)]
        await settle()
        assert not late.started
        await pool.wake_all()
        await settle()
        assert late.started
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    clock.run(main())


def test_engine_holds_its_shared_device_while_starting():
    async def main():
        pool = EnginePool([HeldEngine()], Deadlines(), SCHEDULE, events=Events())
        await pool.sleep_colocated()
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def start():
            async with pool.hold_devices():
                begun.set()
                await may_end.wait()

        starting = asyncio.create_task(start())
        await settle()
        assert not begun.is_set()
        await pool.wake_all()
        await begun.wait()
        lending = asyncio.create_task(pool.sleep_colocated())
        await settle()
        assert not lending.done()
        may_end.set()
        await asyncio.gather(starting, lending)

    clock.run(main())


def test_task_runs_on_preferred_devices_with_room():
    async def main():
        reads, writes = HeldEngine(capacity=4, device="h20"), HeldEngine(capacity=4, device="h800")
        pool = EnginePool([reads, writes], Deadlines(), SCHEDULE, events=Events(), preferred_devices={"long": "h800"})
        tasks = [
            asyncio.create_task(pool.generate(request(str(n), task="long" if n < 3 else "short"))) for n in range(6)
        ]
        await settle()
        assert [generation.request.task for generation in writes.started] == ["long"] * 3
        assert [generation.request.task for generation in reads.started] == ["short"] * 3
        more = [asyncio.create_task(pool.generate(request(f"more {n}", task="long"))) for n in range(4)]
        await settle()
        assert len(writes.started) == len(reads.started) == 5, "what is preferred is full: the others take it"
        for task in (*tasks, *more):
            task.cancel()
        await asyncio.gather(*tasks, *more, return_exceptions=True)

    clock.run(main())


class WaveEngine(HeldEngine):
    """An engine that notes when it stands still."""

    def __init__(self, **how):
        super().__init__(**how)
        self.log = []

    def start(self, request):
        self.log.append(request.id)
        return super().start(request)

    def pause(self):
        self.log.append("pause")

    def resume(self):
        self.log.append("resume")


def test_deterministic_pool_sends_waves_in_one_order():
    """Each wave when nobody does anything but wait for it, whichever order its requests came in."""

    async def main():
        one, two = WaveEngine(capacity=1), WaveEngine(capacity=1)
        pool = EnginePool([one, two], Deadlines(), SCHEDULE.model_copy(update={"deterministic": True}), events=Events())
        watch = asyncio.create_task(pool.watch())
        names = ["10.0.0/0", "2.1.0/0", "2.0.0/1", "2.0.0/0", "3.0.0/0"]
        tasks = [asyncio.create_task(pool.generate(request(name, priority=name == "3.0.0/0"))) for name in names]
        gone = asyncio.create_task(pool.generate(request("1.0.0/0")))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(1)
        assert one.log == ["pause", "2.0.0/0", "2.1.0/0", "3.0.0/0", "resume"]
        assert two.log == ["pause", "2.0.0/1", "10.0.0/0", "resume"]
        for generation in (*one.started, *two.started):
            generation.finish()
        await asyncio.gather(*tasks)
        assert [engine.log.count("pause") for engine in (one, two)] == [1, 1], "nothing is asked any more"
        watch.cancel()

    clock.run(main())  # in virtual time


def test_engines_that_lack_the_newest_weights_catch_up():
    async def main():
        old, new = HeldEngine(), HeldEngine()
        new.version = 2
        pool = pool_of(old, new)
        assert pool.version == 0
        asked = asyncio.create_task(pool.generate(request("a", min_version=1)))
        old.may_load.set()  # the other would never load
        await asyncio.wait_for(pool.load_stale(WeightsUpdate(version=2, location="", manifest=None), "keep"), 60)
        assert (old.version, pool.version) == (2, 2)
        await settle()
        (started,) = (*old.started, *new.started)
        started.finish()
        await asked

    asyncio.run(main())


def test_tokens_are_told_as_they_come():
    class Telling(HeldGeneration):
        def __aiter__(self):
            return self._deltas()

        async def _deltas(self):
            yield "first"
            yield "second"

    async def main():
        engine, heard = HeldEngine(), []
        engine.start = lambda asked: engine.started.append(Telling(asked)) or engine.started[-1]
        task = asyncio.create_task(pool_of(engine).generate(request("a"), heard.append))
        await settle()
        assert heard == ["first", "second"]
        engine.started[0].finish()
        assert (await task).tokens.tolist() == [0, 0]

    asyncio.run(main())


def test_load_of_each_engine_is_described():
    async def main():
        one, two = HeldEngine(capacity=1), HeldEngine(capacity=3)
        pool = pool_of(one, two)
        tasks = [asyncio.create_task(pool.generate(request(f"r{number}"))) for number in range(9)]
        await settle()
        loading = asyncio.create_task(pool.load(WeightsUpdate(version=1, location="", manifest=None), OnUpdate.KEEP))
        two.may_load.set()
        await settle()
        load = pool.describe_load()
        assert [each.running for each in load.engines] == [len(one.started), len(two.started)]
        assert load.waiting == 9 - len(one.started) - len(two.started) > 0
        assert [(each.capacity, each.version, each.state) for each in load.engines] == [
            (1, 0, "loading"),
            (3, 1, "ready"),
        ]
        for task in (loading, *tasks):
            task.cancel()
        await asyncio.gather(loading, *tasks, return_exceptions=True)
        assert sum(each.running for each in pool.describe_load().engines) == pool.describe_load().waiting == 0

    asyncio.run(main())
