"""Roles of the user's own: what a worker calls of an object, what it refuses, and what a checkpoint keeps."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from antiphon.core.errors import ConfigError, RecordError
from antiphon.core.rpc import Client
from antiphon.learning.roles import Role, RoleWorker
from tests.raising import raises_with

FACTORY = f"{__name__}:Tally"


class Tally:
    """Adds numbers."""

    unit = "m"  # no method

    def __init__(self, start=0):
        if start < 0:
            raise ValueError("counts from 0")
        self.total = start
        self.inside = self.most_inside = 0

    def add(self, *numbers):
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.total += sum(numbers)
        self.inside -= 1
        return self.total

    def thread(self):
        return threading.get_ident()

    async def meet(self, barrier):
        await barrier.wait()
        return threading.get_ident()

    def fail(self):
        raise LookupError("nothing there")

    def _secret(self):
        return "told"


class Kept(Tally):
    """Can be saved."""

    def state(self):
        return b"%d" % self.total

    def restore(self, state):
        self.total = int(state)


class Here:
    """A handle of a worker in this process."""

    def __init__(self, worker):
        loop = asyncio.get_running_loop()
        self.worker, self.hear = worker, None
        worker.emit = lambda reply: loop.call_soon_threadsafe(self.hear, reply)

    def on_event(self, hear):
        self.hear = hear

    def on_death(self, hear):
        """It cannot die alone."""

    def send(self, method, *args):
        getattr(self.worker, method)(*args)

    async def close(self):
        await asyncio.to_thread(self.worker.close)


@asynccontextmanager
async def running(factory=FACTORY, **options):
    client = Client(Here(RoleWorker("tally", factory, options)))
    await client.started()
    try:
        yield client
    finally:
        await client.end()


def test_methods_are_called_one_after_another():
    async def main():
        async with running(start=5) as client:
            sums = await asyncio.gather(*(client.call("call", "add", number, 1) for number in range(20)))
            threads = {await client.call("call", "thread") for _ in range(3)}
            await client.call("health")
            return sums, threads

    sums, threads = asyncio.run(main())
    assert len({*sums}) == 20 and max(sums) == 5 + sum(range(20)) + 20
    assert threading.get_ident() not in threads


def test_async_methods_run_beside_others():
    """Each waits for the other; beside the loop's own thread there is none that they are called in."""

    async def main():
        async with running() as client:
            barrier = asyncio.Barrier(2)
            return await asyncio.gather(*(client.call("call", "meet", barrier) for _ in range(2)))

    one, other = asyncio.run(asyncio.wait_for(main(), 60))
    assert one == other


@pytest.mark.parametrize("method", ["ad", "_secret", "__init__", "unit"])
def test_a_method_that_is_none_is_named_with_those_there_are(method):
    async def main():
        async with running() as client:
            with raises_with(ConfigError, key="roles.tally", value=method) as raised:
                await client.call("call", method)
            return str(raised.value)

    message = asyncio.run(main())
    assert all(name in message for name in ("add", "thread", "meet", "fail"))
    assert "_secret" not in message.partition("there are")[2] and "unit" not in message.partition("there are")[2]


def test_an_error_of_a_method_names_it_and_its_place():
    async def main():
        async with running() as client:
            with raises_with(ConfigError, key="roles.tally", value="fail") as raised:
                await client.call("call", "fail")
            assert await client.call("call", "add", 1) == 1, "it goes on"
            return str(raised.value)

    message = asyncio.run(main())
    assert "nothing there" in message and "test_roles.py" in message


@pytest.mark.parametrize(
    ("factory", "options", "key", "value"),
    [
        (FACTORY, {"start": -1}, "roles.tally", FACTORY),
        (FACTORY, {"stop": 1}, "roles.tally", FACTORY),
        (f"{__name__}:Nothing", {}, "roles.tally.factory", f"{__name__}:Nothing"),
    ],
)
def test_what_cannot_be_made_is_refused(factory, options, key, value):
    with raises_with(ConfigError, key=key, value=value):
        RoleWorker("tally", factory, options)


@pytest.mark.parametrize(("factory", "has"), [(FACTORY, False), (f"{__name__}:Kept", True)])
def test_an_object_has_state_if_it_can_be_saved_and_restored(factory, has):
    async def main():
        async with running(factory) as client:
            return await client.call("has_state")

    assert asyncio.run(main()) is has


# --- as stages see it --------------------------------------------------------------------------------------------------


class Workers:
    """Answers the questions of a role as its workers do."""

    def __init__(self, state=None):
        self.state, self.asked = state, []

    async def __call__(self, question, *args):
        self.asked.append((question, *args))
        match question:
            case "state":
                return self.state
            case "restore":
                return self.state is None or args != (None,)
        await asyncio.sleep(0)
        return [question, *args]


def test_calls_go_to_one_worker_or_all_and_are_timed():
    async def main():
        role, loop = Role("tally", Workers()), asyncio.get_running_loop()
        began = loop.time()
        said = await role.call("add", 1), await role.call_all("add", 2)
        return said, role.take_seconds(), role.take_seconds(), loop.time() - began

    said, seconds, then, passed = asyncio.run(main())
    assert said == (["call", "add", 1], ["call_all", "add", 2])
    assert passed >= seconds > 0 == then


def test_state_is_in_the_checkpoint_and_comes_back(tmp_path):
    workers, other, none = Workers(b"seen"), Workers(b""), Workers()
    for each, name in ((workers, "tally"), (other, "other"), (none, "none")):
        asyncio.run(Role(name, each).save(tmp_path))
    assert {path.name: path.read_bytes() for path in (tmp_path / "roles").iterdir()} == {
        "tally.bin": b"seen",
        "other.bin": b"",
    }
    for each, name in ((workers, "tally"), (other, "other"), (none, "none")):
        asyncio.run(Role(name, each).restore(tmp_path))
    assert [each.asked[-1] for each in (workers, other, none)] == [
        ("restore", b"seen"),
        ("restore", b""),
        ("restore", None),
    ]


def test_a_state_that_is_missing_or_none_is_an_error(tmp_path):
    with raises_with(RecordError, path=str(tmp_path / "roles" / "tally.bin")):
        asyncio.run(Role("tally", Workers(b"seen")).restore(tmp_path))
    with raises_with(ConfigError, key="roles.tally"):
        asyncio.run(Role("tally", Workers({"total": 1})).save(tmp_path))
    assert not (tmp_path / "roles").exists()
