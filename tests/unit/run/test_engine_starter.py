"""Starting the engines of a pool: what begins with some of them, and what not."""

import asyncio
import json
import re
from contextlib import asynccontextmanager

import pytest

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, StallError, WorkerDiedError
from antiphon.core.types import OnUpdate, WeightsUpdate
from antiphon.engines.config import EngineConfig
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.engine_supervisor import EngineSupply
from antiphon.rollout.pool import EnginePool
from antiphon.run.device_assignment import DeviceAssignment
from antiphon.run.launch.engines import EngineStarter
from tests.raising import raises_with

DEADLINE = 5.0  # of which engines that do not hang need a moment, once there is what they are forks of


KIND = "tests.unit.engine_for_tests:open_engine"


@pytest.fixture
def folder(tmp_path):
    """Of a model, as far as anybody looks."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    return tmp_path


def started(folder, minimum, then):
    """Begin with two engines, the first of which hangs, and go on with their starter."""
    config = EngineConfig(kind=KIND, replicas=2, minimum=minimum)

    async def main():
        cluster = LocalCluster(ClusterConfig())
        try:
            await cluster.spawn("first", "tests.unit.cluster.workers_for_tests:Counter").call("pid")
            told = []
            starter = EngineStarter(cluster, "engine", folder, config)
            engines = await starter.start_first(Deadlines(), DEADLINE, told.append)
            await then(starter, engines, told)
        finally:
            await cluster.close()

    asyncio.run(main())


def test_engine_that_hangs_while_starting_is_retried(folder):
    async def then(starter, engines, told):
        assert len(engines) == 1
        (message,) = told
        assert message.startswith("the run begins with 1 of 2 engines") and "to load the model" in message
        assert (await starter.start_replacement()).capacity == 1
        with pytest.raises(WorkerDiedError, match="all engines are running"):
            await starter.start_replacement()

    started(folder, 1, then)


def test_where_all_engines_are_needed_one_that_hangs_is_the_end(folder):
    with pytest.raises(StallError) as caught:
        started(folder, 0, None)
    assert re.fullmatch(r"engine-\d to load the model", caught.value.on)


@pytest.mark.parametrize("lent", [True, False])
def test_colocated_engine_starts_in_the_engines_turn(folder, lent):
    (folder / "begun").mkdir()  # so that none hangs
    turns = []

    @asynccontextmanager
    async def turn():
        turns.append((folder / "opened").exists())
        yield
        turns.append((folder / "opened").exists())

    async def main():
        cluster = LocalCluster(ClusterConfig())
        starter = EngineStarter(
            cluster,
            "engine",
            folder,
            EngineConfig(kind=KIND),
            assign_devices=lambda _: DeviceAssignment(colocated=lent),
        )
        starter.hold_devices = turn
        try:
            assert (await starter.start_replacement()).colocated == lent
        finally:
            await cluster.close()

    asyncio.run(main())
    assert turns == ([False, True] if lent else [])


@pytest.mark.parametrize(("number", "key"), [(0, "engine.kind"), (2, "engine.also.0.kind")])
def test_engine_that_cannot_be_imported_names_its_key(folder, number, key):
    """One with an interpreter of its own is imported when it starts, and not before."""
    good, bad = {"kind": KIND}, {"kind": "tests.unit.engine_for_tests:open_engin"}
    (folder / "begun").mkdir()  # or the good one would hang
    first, second = (bad, good) if number == 0 else (good, bad)
    config = EngineConfig(**first, replicas=2, also=(second,))

    async def main():
        cluster = LocalCluster(ClusterConfig())
        try:
            with raises_with(ConfigError, key=key, value=bad["kind"], suggestions=("open_engine",)):
                await EngineStarter(cluster, "engine", folder, config).start_first(Deadlines(), 60, print)
        finally:
            await cluster.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "mode", [OnUpdate.KEEP, OnUpdate.RESTART, OnUpdate.DRAIN]
)  # of the ways in which this engine fails
def test_place_of_an_engine_that_cannot_load_is_free_again(folder, mode):
    config = EngineConfig(kind="tests.unit.engine_for_tests:open_unlucky")
    schedule = RolloutConfig(groups_per_step=1, engine_restarts=1, sampling={"max_tokens": 4})

    async def main():
        cluster = LocalCluster(ClusterConfig())
        try:
            starter = EngineStarter(cluster, "engine", folder, config)
            engines = await starter.start_first(Deadlines(), 60, print)
            supply = EngineSupply(start=starter.start_replacement, target=1)
            pool = EnginePool(engines, Deadlines(), schedule, events=Events(), supply=supply)
            await pool.load(WeightsUpdate(version=1, location="", manifest=None), mode)
            assert pool.engines == 0
            replacement = await starter.start_replacement()
            assert replacement is not engines[0] and replacement.capacity == 1
            with pytest.raises(WorkerDiedError):
                await engines[0].health()
        finally:
            await cluster.close()

    asyncio.run(main())
