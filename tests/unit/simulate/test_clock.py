"""Virtual time: jumps, order, and what is refused."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import StallError, StateError
from antiphon.simulate.clock import run
from tests.raising import raises_with


def test_sleeping_moves_the_clock():
    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3600)
        return loop.time()

    assert run(main()) == 3600


@given(st.lists(st.floats(0, 1e6), max_size=30))
def test_timers_run_in_the_order_of_their_times(delays):
    async def main():
        seen = []

        async def sleeper(delay):
            await asyncio.sleep(delay)
            seen.append((delay, asyncio.get_running_loop().time()))

        await asyncio.gather(*map(sleeper, delays))
        return seen

    seen = run(main())
    assert sorted(delay for delay, _ in seen) == sorted(delays)
    assert [at for _, at in seen] == sorted(at for _, at in seen)
    assert all(at == pytest.approx(delay, abs=2e-9) for delay, at in seen)
    assert run(main()) == seen, "one program, one execution"


def test_deadlines_are_virtual():
    async def main():
        never = asyncio.get_running_loop().create_future()
        with raises_with(StallError, owner="the learner", on="groups"):
            await Deadlines().wait(never, name="step", owner="the learner", on="groups", deadline=600)
        return asyncio.get_running_loop().time()

    assert run(main()) == 600


def test_waiting_without_timers_raises_stall_error():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(StallError):
        run(main())


def test_threads_are_refused():
    async def main():
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(StateError):
        run(main())
