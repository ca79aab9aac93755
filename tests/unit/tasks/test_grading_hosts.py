"""Graders in workers of a cluster, on two nodes that this machine stands for: spread, lost, replaced, refused."""

import asyncio
import os
import signal
from collections import Counter

import psutil
import pytest

from antiphon.cluster.base import Gpu, Node
from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.config import load
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, WorkerDiedError
from antiphon.core.types import ScoreStatus
from antiphon.run.config import RunConfig
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.graders import start_graders
from antiphon.run.placement import resolve_placement
from antiphon.simulate.clock import run
from antiphon.tasks.grading.host import GradingHost, GradingHosts
from antiphon.tasks.grading.pool import GradingStats
from tests.raising import raises_with
from tests.unit.core.test_worker_set import PATIENCE, SILENCE, Handle
from tests.unit.tasks.test_grading import EMPTY, prompt

CORES = tuple(sorted(os.sched_getaffinity(0)))
HOSTILE = "tests.unit.tasks.hostile_rewards"
BOTH = "node1.cpu:0-0, node2.cpu:0-0"


class Nodes(LocalCluster):
    """This machine as several nodes, any of which may leave."""

    def __init__(self, *names):
        super().__init__(ClusterConfig())
        self.names = names
        self.left = set()

    def nodes(self):
        return [Node(name, CORES, has_left=name in self.left) for name in self.names]


def configured(placement, reward="obey", **sections):
    """A run's configuration, without what is placed anywhere else."""
    task = {"name": "obey", "prompts": {"source": "jsonl", "path": "x"}, "reward": f"{HOSTILE}:{reward}"}
    given = {"name": "x", "steps": 1, "model": {"path": "x"}, "tasks": [task], "placement": {"reward": placement}}
    sections.setdefault("rollout", {})
    sections["rollout"] |= {"groups_per_step": 1, "group_size": 2, "sampling": {"max_tokens": 8}}
    sections |= {"cluster": {"kind": "ray"}} if placement == "anywhere" else {}
    return load(given | sections, model=RunConfig)


async def with_graders(cluster, config, use, deadlines=None):
    """Return what `use` returns of the router and of the list that takes messages for the user."""
    told = []
    context = LaunchContext(
        cluster=cluster,
        config=config,
        placement=resolve_placement(cluster.nodes(), config),
        deadlines=deadlines or Deadlines(),
        report=told.append,
    )
    try:
        async with start_graders(context) as graders:
            return await use(graders.router, told)
    finally:
        await cluster.close()


async def grade(router, count, payload=1.0):
    return await asyncio.gather(*(router.score(prompt(payload), EMPTY) for _ in range(count)))


async def hosts(router):
    """Process ids of the hosts by the names of their nodes; all are asked at once, so that each gets something."""
    scores = await grade(router, 8, "pid")
    return {score.grader.rpartition(" on ")[2]: psutil.Process(int(score.value)).ppid() for score in scores}


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_each_host_writes_the_profiles_of_its_processes(tmp_path):
    async def use(router, told):
        await router.start_profile(False)
        await grade(router, 24)
        await router.write_profile(tmp_path / "step", "")

    asyncio.run(with_graders(Nodes("a", "b", "c"), configured(BOTH), use))
    names = {file.name.partition("-of-")[2] for file in (tmp_path / "step").iterdir()}
    assert names == {"reward-0-on-node1.txt", "reward-1-on-node2.txt"}


@pytest.mark.parametrize("placement", ["node1.cpu:0-0, node2.cpu:0-0", "anywhere"])
def test_gradings_spread_over_nodes_and_name_them(placement):
    async def use(router, told):
        return await grade(router, 24), router.stats, told

    scores, stats, told = asyncio.run(with_graders(Nodes("a", "b", "c"), configured(placement), use))
    graders = Counter(score.grader for score in scores)
    nodes = {grader.rpartition(" on ")[2] for grader in graders}
    assert nodes == ({"node0", "node1", "node2"} if placement == "anywhere" else {"node1", "node2"})
    assert {score.value for score in scores} == {1.0} and {*graders.values()} == {24 / len(nodes)}
    assert (stats.scored, stats.processes) == (24, len(nodes))
    assert told == []


def test_a_grading_is_a_wait_that_the_run_sees():
    """A deterministic run goes on when nobody waits any more."""
    deadlines = Deadlines()

    async def use(router, told):
        asked = asyncio.ensure_future(grade(router, 3))
        await asyncio.sleep(0)
        while not (waits := [wait.on for wait in deadlines.open() if wait.name == "grade"]):
            await deadlines.change()
        await asked
        return waits, [wait for wait in deadlines.open() if wait.name == "grade"]

    during, after = asyncio.run(with_graders(Nodes("a", "b", "c"), configured(BOTH), use, deadlines))
    assert {*during} == {f"the grade of prompt {prompt(1.0).id}"} and not after


def test_a_lost_host_is_replaced_and_its_gradings_go_on():
    async def use(router, told):
        before = await hosts(router)
        asked = asyncio.ensure_future(grade(router, 16))
        await asyncio.sleep(0)  # all are under way
        os.kill(before["node1"], signal.SIGKILL)
        scores = await asked
        while len(after := await hosts(router)) < 2:
            pass
        return before, after, scores, told

    before, after, scores, told = asyncio.run(with_graders(Nodes("a", "b", "c"), configured(BOTH), use))
    assert before["node1"] != after["node1"] and before["node2"] == after["node2"]
    assert [score.value for score in scores] == [1.0] * 16
    assert len(told) == 1 and told[0].endswith("graders left: 1")


def test_hung_host_is_killed_and_replaced():
    async def use(router, told):
        hung = (await hosts(router))["node1"]
        os.kill(hung, signal.SIGSTOP)
        return hung, await grade(router, 8), told

    config = configured(BOTH, rollout={"engine_timeout": 2.0})
    hung, scores, told = asyncio.run(with_graders(Nodes("a", "b", "c"), config, use))
    assert [score.value for score in scores] == [1.0] * 8 and hung not in children()
    assert "did not answer for 2 s" in told[0]


def test_graders_come_back_with_their_node():
    cluster = Nodes("a", "b", "c")

    async def use(router, told):
        there = await hosts(router)
        cluster.left = {"b"}
        os.kill(there["node1"], signal.SIGKILL)
        while not any("nowhere to run" in message for message in told):
            assert {score.status for score in await grade(router, 1)} == {ScoreStatus.SCORED}
        cluster.left = set()
        while "node1" not in (found := await hosts(router)):
            pass
        return found

    assert {*asyncio.run(with_graders(cluster, configured(BOTH), use))} == {"node1", "node2"}


@pytest.mark.parametrize("reward", ["Unbuildable", "Dying"])
def test_reward_that_cannot_be_built_ends_the_start(reward):
    async def use(router, told):
        raise AssertionError("started")

    before = children()
    with pytest.raises((ConfigError, WorkerDiedError)):
        asyncio.run(with_graders(Nodes("a", "b"), configured("node1.cpu:0-0", reward), use))
    assert children() <= before


def test_nothing_is_left_behind():
    async def use(router, told):
        await hosts(router)
        return children()

    before = children()
    there = asyncio.run(with_graders(Nodes("a", "b"), configured("node0.cpu:0-0, node1.cpu:0-0"), use))
    assert there - before and children() <= before


def test_two_gpus_of_a_node_need_two_processes():
    config = configured("node1.gpu:0-1")
    node = Node(gpus=(Gpu("0"), Gpu("1")))
    with raises_with(ConfigError, key="placement.reward"):
        resolve_placement([node, node], config)
    more = configured("node0.gpu:0-1, node1.gpu:0-1", grading={"workers": 2})
    assert [place.gpus for place in resolve_placement([node, node], more).places["reward"]] == [("0", "1")] * 2


class CountingHandle(Handle):
    """Its replies count one process, and as many scores as its number says."""

    def __init__(self, number):
        super().__init__(f"host {number}")
        self.stats = GradingStats(scored=number, processes=1)

    def reply(self, reply):
        super().reply(reply._replace(state=self.stats))


def test_what_the_dead_counted_is_kept():
    started = []

    async def start(number):
        started.append(CountingHandle(10 ** len(started)))
        return GradingHost(started[-1])

    async def main():
        async with GradingHosts(start, 2, Deadlines(), lambda message: None, SILENCE) as hosts:
            await asyncio.sleep(1)
            assert hosts.stats == GradingStats(scored=11, processes=2)
            for dead in range(2):
                started[dead].kill()
                assert hosts.stats.scored == int("1" * len(started)), "before another takes its place"
                await asyncio.sleep(PATIENCE)
            assert hosts.stats == GradingStats(scored=1111, processes=4)

    run(main())
