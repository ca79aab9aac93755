"""Environments in processes: real ones, which hang, raise and die."""

import asyncio
import itertools

import pytest

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.errors import SandboxError
from antiphon.core.types import Prompt
from antiphon.rollout.environment_pool import EnvironmentPool
from antiphon.simulate.clock import run
from antiphon.tasks.config import EnvironmentPoolConfig

PROMPT = Prompt(id="p", task="t", messages=())
HERE = "tests.unit.rollout.blocking_worlds:"


def with_worlds(test, name="Odd", options=None, seconds=100.0, **config):
    """Run a test with a pool of its own."""

    async def body():
        cluster, numbers = LocalCluster(ClusterConfig(fork=False)), itertools.count()

        def spawn():
            factory = "antiphon.tasks.environments.host:EnvironmentHost"
            return cluster.spawn(f"environment-{next(numbers)}", factory, HERE + name, options or {})

        worlds = EnvironmentPool(EnvironmentPoolConfig(**config), spawn, seconds)
        try:
            await asyncio.wait_for(test(worlds), 100)
        finally:
            await worlds.close()
            await cluster.close()
        assert worlds.processes == 0

    asyncio.run(body())


async def pid_of(world):
    return int((await world.reset(1))[1]["state_key"])


def test_many_live_in_one_process_and_none_holds_up_another():
    async def body(worlds):
        pair = [worlds.make(PROMPT) for _ in range(2)]
        assert len({observation for observation, _ in await asyncio.gather(*(each.reset(1) for each in pair))}) == 1
        told = await asyncio.gather(*(each.step(str(number)) for number, each in enumerate(pair)))
        assert [observation for observation, *_ in told] == ["0", "1"]  # each waited for the other
        await asyncio.gather(*(each.close() for each in pair))

    with_worlds(body, "Meets")


def test_an_environment_is_made_for_its_prompt_with_its_options():
    async def body(worlds):
        world = worlds.make(PROMPT)
        observation, info = await world.reset(7)
        assert observation == "good day p 7"
        assert set(info) == {"state_key"}, "of an info, which may hold any object, what the loop reads"
        assert (await world.step("abc"))[:2] == ("ABC", 0.5)
        await world.close()

    with_worlds(body, options={"greeting": "good day"})


def test_what_an_environment_raises_is_raised_to_who_called_it():
    async def body(worlds):
        for prompt, action, message in (
            ("p", "raise", "KeyError: 'no such thing'"),
            ("p", "exit", "SystemExit: 3"),
            ("p", "text", r"TypeError: .*blocking_worlds.py:\d+\)"),
            ("unmade", None, "ValueError: there is no such world"),
        ):
            world = worlds.make(Prompt(id=prompt, task="t", messages=()))
            with pytest.raises(SandboxError, match=message):
                await world.reset(1)
                await world.step(action)
            if prompt == "p":
                assert (await world.step("on"))[0] == "ON"  # it is the environment's to say whether it goes on
                await world.close()
        world = worlds.make(Prompt(id="cannot close", task="t", messages=()))
        await world.reset(1)
        with pytest.raises(SandboxError, match="stuck"):
            await world.close()
        assert worlds.processes == 1

    with_worlds(body)


def test_hung_environment_does_not_disturb_others():
    async def body(worlds):
        hangs, other = worlds.make(PROMPT), worlds.make(PROMPT)
        first = await pid_of(hangs)
        assert await pid_of(other) == first
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hangs.step("hang"), 0.2)
        await hangs.close()
        assert (await other.step("x"))[0] == "X"
        new = worlds.make(PROMPT)
        assert await pid_of(new) != first and worlds.processes == 2
        await other.close()
        assert worlds.processes == 1
        await new.close()

    with_worlds(body, seconds=0.2)


def test_cancelled_calls_cost_no_process():
    """As of attempts that are redundant or stale: the environment goes on, and hangs nobody."""

    async def body(worlds):
        first = worlds.make(PROMPT)
        for _ in range(5):  # the process is still starting
            world = worlds.make(PROMPT)
            call = asyncio.ensure_future(world.reset(1))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            await world.close()
        pid = await pid_of(first)
        later = worlds.make(PROMPT)
        assert await pid_of(later) == pid and worlds.processes == 1
        await first.close()
        await later.close()

    with_worlds(body)


def test_call_that_was_given_up_and_never_ends_retires_its_process():
    async def body(worlds):
        world = worlds.make(PROMPT)
        pid = await pid_of(world)
        call = asyncio.ensure_future(world.step("hang"))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        await world.close()
        other = worlds.make(PROMPT)
        assert await pid_of(other) == pid  # it may yet come back
        await other.close()
        while worlds.processes:
            await asyncio.sleep(0.01)

    with_worlds(body, seconds=1.0)


class Silent:
    """A process that is in this one, and answers what and when the test says."""

    name = "silent"
    killed = False

    def send(self, method, *args):
        pass

    def on_event(self, callback):
        self.answer = callback

    def on_death(self, callback):
        pass

    def kill(self):
        self.killed = True

    async def close(self):
        pass


@pytest.mark.parametrize("answers", [True, False])
def test_answer_that_comes_as_its_caller_gives_up_is_not_waited_for(answers):
    async def body():
        process = Silent()
        worlds = EnvironmentPool(EnvironmentPoolConfig(), lambda: process, 10.0)
        call = asyncio.ensure_future(worlds.make(PROMPT).reset(1))
        await asyncio.sleep(1)
        call.cancel()
        if answers:
            process.answer((0, True, ("hello", {})))
        await asyncio.sleep(20)
        first = worlds.processes
        worlds.make(PROMPT)
        return first, worlds.processes

    assert run(body()) == ((1, 1) if answers else (1, 2))  # the environment still holds its process


def test_one_that_dies_takes_along_only_its_process():
    async def body(worlds):
        dies, beside, elsewhere = (worlds.make(PROMPT) for _ in range(3))
        pids = [await pid_of(each) for each in (dies, beside, elsewhere)]
        assert pids[0] == pids[1] != pids[2]
        waiting = asyncio.create_task(beside.step("hang"))
        for failing in (dies.step("die"), waiting):
            with pytest.raises(SandboxError, match="exit code 3"):
                await failing
        assert (await elsewhere.step("x"))[0] == "X"
        await asyncio.gather(*(each.close() for each in (dies, beside)), return_exceptions=True)
        again = worlds.make(PROMPT)
        assert (await again.reset(2))[0] == "hello p 2"
        await again.close()
        await elsewhere.close()

    with_worlds(body, max_workers=2, environments=2)


def test_processes_are_as_many_as_it_takes():
    async def body(worlds):
        live = [worlds.make(PROMPT) for _ in range(8)]
        pids = [await pid_of(each) for each in live]
        assert worlds.processes == 3 and {pids.count(pid) for pid in pids} == {2, 3}
        await asyncio.gather(*(each.close() for each in live))
        async with asyncio.timeout(60):
            while worlds.processes > 1:
                await asyncio.sleep(0.01)

    with_worlds(body, max_workers=3, environments=2, idle_seconds=0.01)
