"""The simulated engine against one that is simulated iteration by iteration, and what becomes of its requests."""

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.deadlines import Deadlines
from antiphon.core.types import MIXED_CACHE, FinishReason, GenerateRequest, OnUpdate, Sampling, WeightsUpdate
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.pool import EnginePool
from antiphon.simulate.clock import run
from antiphon.simulate.engine import SimulatedEngine
from antiphon.simulate.engine_speed import EngineSpeed

SCHEDULE = RolloutConfig(groups_per_step=1, engine_timeout=30, load_timeout=30, sampling={"max_tokens": 8})
SPEED = EngineSpeed(slots=3, iteration=1.0, per_sequence=0.25, per_token=0.01, prefill=0.1)


def request(name, prompt=4, tokens=8, **changes):
    return GenerateRequest(
        id=str(name), tokens=np.zeros(prompt, np.int32), sampling=Sampling(max_tokens=tokens), **changes
    )


def update(version):
    return WeightsUpdate(version=version, location="", manifest=None)


@dataclass
class Job:
    arrival: float
    prompt: int
    tokens: int


def by_iterations(jobs, speed):
    """When each job ends on an engine that is followed iteration by iteration."""
    ends, queue, running, now = {}, sorted(range(len(jobs)), key=lambda i: (jobs[i].arrival, i)), {}, 0.0
    while queue or running:
        if not running and jobs[queue[0]].arrival > now:
            now = jobs[queue[0]].arrival
        read = 0
        while queue and jobs[queue[0]].arrival <= now and len(running) < speed.slots:
            running[queue.pop(0)] = 0
            read += jobs[next(reversed(running))].prompt
        now += speed.prefill * read
        cached = sum(jobs[i].prompt + done for i, done in running.items())
        now += speed.iteration + speed.per_sequence * len(running) + speed.per_token * cached
        for i in list(running):
            running[i] += 1
            if running[i] == jobs[i].tokens:
                del running[i]
                ends[i] = now
    return [ends[i] for i in range(len(jobs))]


def played(jobs, speed):
    async def main():
        engine = SimulatedEngine(speed, length=lambda r: r.sampling.max_tokens)
        loop = asyncio.get_running_loop()

        async def one(number, job):
            await asyncio.sleep(job.arrival)
            completion = await engine.start(request(number, job.prompt, job.tokens)).result()
            assert len(completion.tokens) == job.tokens
            return loop.time()

        return await asyncio.gather(*(one(number, job) for number, job in enumerate(jobs)))

    return run(main())


@given(
    st.lists(
        # Arrivals apart from each other and from every iteration's end, so that both orders of events agree.
        st.builds(Job, st.just(0.0), st.integers(1, 9), st.integers(1, 12)),
        min_size=1,
        max_size=9,
    ),
    st.lists(st.integers(1, 400), min_size=9, max_size=9),
)
def test_stretches_take_as_long_as_their_iterations(jobs, gaps):
    arrival = 0.0
    for job, gap in zip(jobs, gaps, strict=False):
        arrival += gap * 0.0173205
        job.arrival = arrival
    assert played(jobs, SPEED) == pytest.approx(by_iterations(jobs, SPEED), rel=1e-9)


def test_a_full_cache_makes_the_newest_give_way():
    async def main():
        engine = SimulatedEngine(SPEED.model_copy(update={"memory": 24}), length=lambda r: 10)
        handles = [engine.start(request(name, prompt=4, tokens=10)) for name in "ab"]
        done = [await handle.result() for handle in handles]
        assert engine.preemptions == 1
        assert [len(completion.tokens) for completion in done] == [10, 10]
        assert engine.read_tokens == 4 + 4 + (4 + 7), "what gave way, with seven tokens, is read again"
        assert engine.sampled_tokens == 20

    run(main())


def test_siblings_read_their_prompt_once():
    async def main():
        engine = SimulatedEngine(SPEED, length=lambda r: 5)
        group = [engine.start(request(i, prompt=7, affinity=("g",))) for i in range(3)]
        for handle in group:
            await handle.result()
        assert engine.read_tokens == 7

    run(main())


def test_an_aborted_request_keeps_its_tokens_and_frees_its_seat():
    async def main():
        engine = SimulatedEngine(EngineSpeed(slots=1, iteration=1.0), length=lambda r: 8)
        first, second = engine.start(request("a")), engine.start(request("b"))
        await asyncio.sleep(3.5)
        first.abort()
        first.abort()
        completion = await first.result()
        assert completion.finish is FinishReason.ABORT
        assert len(completion.tokens) == 3
        second.abort()
        assert len((await second.result()).tokens) == 0, "it never ran"

    run(main())


@pytest.mark.parametrize("mode", list(OnUpdate))
def test_new_weights_in_mid_flight(mode):
    async def main():
        engine = SimulatedEngine(EngineSpeed(slots=2, iteration=1.0, prefill=0.5, load=10.0), length=lambda r: 6)
        handle = engine.start(request("a", prompt=4))
        await asyncio.sleep(2 + 3.5)  # it was read, and has three tokens
        await engine.load(update(1), mode)
        loaded = asyncio.get_running_loop().time()
        assert engine.version == 1
        completion = await handle.result()
        return loaded, asyncio.get_running_loop().time(), completion

    loaded, ended, completion = run(main())
    versions, mixed = completion.versions.tolist(), completion.streams[MIXED_CACHE].tolist()
    match mode:
        case OnUpdate.KEEP:
            assert (loaded, ended) == (15.5, 18.5)
            assert versions == [0, 0, 0, 1, 1, 1]
            assert mixed == [False] * 3 + [True] * 3
        case OnUpdate.RECOMPUTE:
            assert (loaded, ended) == (15.5, 15.5 + 0.5 * 7 + 3)
            assert versions == [0, 0, 0, 1, 1, 1]
            assert not any(mixed)
        case OnUpdate.RESTART:
            assert (loaded, ended) == (15.5, 15.5 + 2 + 6)
            assert versions == [1] * 6
        case OnUpdate.DRAIN:
            assert (loaded, ended) == (18.0, 18.0)
            assert versions == [0] * 6


def test_another_engine_continues_after_a_crash():
    async def main():
        speed = EngineSpeed(slots=2, iteration=1.0)
        first, second = (SimulatedEngine(speed, length=lambda r: 6) for _ in range(2))
        pool = EnginePool([first, second], Deadlines(), SCHEDULE, events=Events())
        task = asyncio.create_task(pool.generate(request("a")))
        await asyncio.sleep(2.5)
        first.crash()
        completion = await task
        assert len(completion.tokens) == 6
        assert (first.sampled_tokens, second.sampled_tokens, pool.requeued_tokens) == (2, 4, 2)
        assert asyncio.get_running_loop().time() == 2.5 + 4

    run(main())


def test_hung_engine_is_replaced():
    async def main():
        speed = EngineSpeed(slots=1, iteration=1.0)
        engines = [SimulatedEngine(speed, length=lambda r: 6) for _ in range(2)]
        told = []
        pool = EnginePool(engines, Deadlines(), SCHEDULE, events=Events(), report_death=told.append)
        watch = asyncio.create_task(pool.watch())
        tasks = [asyncio.create_task(pool.generate(request(name))) for name in "ab"]
        await asyncio.sleep(2.5)
        engines[0].hang()
        loading = asyncio.create_task(pool.load(update(1), OnUpdate.KEEP))
        done = await asyncio.gather(*tasks)
        await loading
        watch.cancel()
        assert [len(completion.tokens) for completion in done] == [6, 6]
        assert told == ["an engine did not answer for 30 s and was killed; engines left: 1"]
        assert (pool.engines, pool.requeued_tokens) == (1, 2)
        return asyncio.get_running_loop().time()

    assert run(main()) < 2.5 + 2 * 30 + 12


def test_a_slow_engine_takes_longer():
    async def main():
        engine = SimulatedEngine(EngineSpeed(iteration=1.0), length=lambda r: 6)
        handle = engine.start(request("a"))
        await asyncio.sleep(2)
        engine.slow_down(5)
        await asyncio.sleep(10)
        engine.slow_down(1)
        await handle.result()
        return asyncio.get_running_loop().time()

    assert run(main()) == 2 + 2 * 5 + 2
