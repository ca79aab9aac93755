"""The publisher is the only way to the learner, and orders what happens to weights."""

import asyncio

import pytest

from antiphon.algorithms.rewards import AlgorithmState
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import StateError
from antiphon.core.types import PolicyVersion, TrainBatch, WeightsUpdate
from antiphon.learning.backend import StepResult, TrainBackend
from antiphon.rollout.backend import RolloutBackend
from antiphon.run.config import RunConfig
from antiphon.run.device_sharing import SharedDevices
from antiphon.run.publisher import WeightPublisher
from antiphon.weights.base import TransferContext

BATCH = TrainBatch(updates=())


class LoggedTraining(TrainBackend):
    """Training that notes what is asked of it."""

    def __init__(self, log):
        self.log = log

    async def step(self, batch):
        self.log.append("step")
        return {"loss": 1.0}

    async def learn(self, number, version, groups, algorithm_state):
        self.log.append(f"learn {number} at {version}")
        return StepResult({"loss": 1.0}, "digest", algorithm_state)

    async def publish(self, version, transfer):
        self.log.append(f"publish {version}")
        return WeightsUpdate(version=version, location=f"weights-{version}", manifest=None)

    async def restore(self, checkpoint):
        self.log.append(f"restore {checkpoint.name}")

    async def offload(self):
        self.log.append("offload")

    async def reload(self):
        self.log.append("reload")


class LoggedRollouts(RolloutBackend):
    """Rollouts whose engines load weights when they are let."""

    def __init__(self, log):
        self.log = log
        self.may_load = asyncio.Event()

    async def load(self, update, mode):
        await self.may_load.wait()
        self.log.append(f"loaded {update.version}")

    async def release_devices(self):
        self.log.append("release devices")

    async def reclaim_judges(self):
        self.log.append("reclaim judges")

    async def reclaim_engines(self):
        self.log.append("reclaim engines")


class Receiver:
    """A replacement engine."""

    def __init__(self, version):
        self.version = version

    async def load(self, update, mode):
        self.version = update.version


class Ledger:
    """The versions that were recorded."""

    def __init__(self):
        self.versions = []

    def add_version(self, version, digest):
        self.versions.append(version)


def with_publisher(test, *, version=PolicyVersion(0, 0), shared=False):
    """Run `test(publisher, rollouts, ledger)`; returns what training and rollouts were asked, in order."""
    config = RunConfig(
        name="run",
        steps=1,
        model={"path": "somewhere"},
        tasks=({"name": "t", "prompts": {"source": "a:b"}, "reward": "a:b"},),
        rollout={"groups_per_step": 1, "sampling": {"max_tokens": 1}},
    )
    log = []

    async def main():
        rollouts, ledger = LoggedRollouts(log), Ledger()
        devices = SharedDevices(LoggedTraining(log), rollouts, shared=shared)
        publisher = WeightPublisher(config, Deadlines(), devices, TransferContext(None), version)
        async with asyncio.TaskGroup() as owner:
            publisher.start(owner, ledger)
            await asyncio.wait_for(test(publisher, rollouts, ledger), 30)

    asyncio.run(main())
    return log


@pytest.mark.parametrize(
    "use",
    [
        lambda learner: learner.step(BATCH),
        lambda learner: learner.learn(1, [], AlgorithmState()),
        lambda learner: learner.publish(),
        lambda learner: learner.restore(None),
        lambda learner: learner.save(None),
        lambda learner: learner.begin(None),
        lambda learner: learner.begin_supervised(None, 1),
    ],
)
def test_the_learner_is_out_of_reach_after_an_update(use):
    async def test(publisher, rollouts, ledger):
        async with publisher.updating() as learner:
            pass
        with pytest.raises(StateError):
            await use(learner)

    assert with_publisher(test) == []


def test_a_version_is_published_once_the_last_is_loaded():
    async def test(publisher, rollouts, ledger):
        told = []
        publisher.on_publish = lambda version, to_engines: told.append(version)
        async with publisher.updating() as learner:
            await learner.publish()
        assert publisher.version == PolicyVersion(0, 1) and publisher.is_loading
        async with publisher.updating() as learner:
            second = asyncio.ensure_future(learner.publish())
            await publisher._waits._deadlines.change()
            rollouts.may_load.set()
            await second
        await publisher.wait_loaded()
        assert not publisher.is_loading
        assert told == ledger.versions == [PolicyVersion(0, 1), PolicyVersion(0, 2)]

    assert with_publisher(test) == ["publish 1", "loaded 1", "publish 2", "loaded 2"]


def test_a_replacement_gets_the_last_version_alone():
    async def test(publisher, rollouts, ledger):
        early, late, newest = Receiver(0), Receiver(0), Receiver(1)
        await publisher.refresh(early)
        rollouts.may_load.set()
        async with publisher.updating() as learner:
            await learner.publish()
        await publisher.refresh(late)
        await publisher.refresh(newest)
        assert (early.version, late.version, newest.version) == (0, 1, 1)

    with_publisher(test)


def test_a_replacement_waits_while_weights_change():
    async def test(publisher, rollouts, ledger):
        receiver = Receiver(0)
        rollouts.may_load.set()
        async with publisher.updating() as learner:
            refreshing = asyncio.ensure_future(publisher.refresh(receiver))
            await learner.publish()
            await learner.step(BATCH)
            assert receiver.version == 0
        await refreshing
        assert receiver.version == 1

    with_publisher(test)


@pytest.mark.parametrize(("n", "published"), [(0, []), (3, ["publish 3", "loaded 3"])])
def test_restored_weights_keep_their_version(tmp_path, n, published):
    async def test(publisher, rollouts, ledger):
        rollouts.may_load.set()
        async with publisher.updating() as learner:
            await learner.restore(tmp_path / "step_000003")
        await publisher.wait_loaded()
        assert publisher.version == PolicyVersion(1, n)

    assert with_publisher(test, version=PolicyVersion(1, n)) == ["restore step_000003", *published]


def test_shared_devices_change_hands_around_a_step():
    async def test(publisher, rollouts, ledger):
        rollouts.may_load.set()
        async with publisher.updating() as learner:
            await learner.learn(1, [], AlgorithmState())
            await learner.step(BATCH)  # the devices are there already
            await learner.publish()
        await publisher.switch_to_generation()

    turn = ["release devices", "reload", "learn 1 at 0", "step", "publish 1", "offload", "reclaim judges"]
    log = with_publisher(test, shared=True)
    assert log[:7] == turn and sorted(log[7:]) == ["loaded 1", "reclaim engines"]


@pytest.mark.parametrize("shared", [False, True])
def test_engines_keep_their_weights_until_an_update(shared):
    async def test(publisher, rollouts, ledger):
        told, receiver = [], Receiver(0)
        publisher.on_publish = lambda version, to_engines: told.append((version.n, to_engines))
        rollouts.may_load.set()
        for to_engines in (True, False, False):
            async with publisher.updating() as learner:
                await learner.learn(1, [], AlgorithmState())
                await learner.publish(to_engines)
            await publisher.wait_loaded()
        assert told == [(1, True), (2, False), (3, False)]
        assert (publisher.version.n, publisher.engine_version.n) == (3, 1)
        await publisher.refresh(receiver)
        assert receiver.version == 1, "a replacement gets what the other engines have"
        await publisher.update_engines()
        await publisher.update_engines()
        await publisher.wait_loaded()
        assert publisher.version == publisher.engine_version == PolicyVersion(0, 3)
        assert ledger.versions == [PolicyVersion(0, 1), PolicyVersion(0, 3)], "engines never got the second"

    log = with_publisher(test, shared=shared)
    assert [each for each in log if each.split()[0] in ("learn", "publish", "loaded")] == [
        *("learn 1 at 0", "publish 1", "loaded 1", "learn 1 at 1", "learn 1 at 2", "publish 3", "loaded 3")
    ]
    assert log.count("reclaim engines") == (2 if shared else 0), "with old weights, they generate on"
