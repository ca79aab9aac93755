"""Graders in workers of a cluster, on two nodes that this machine stands for: spread, lost, replaced, refused."""

import asyncio
import os
import signal
from collections import Counter

import psutil
import pytest

from antiphon.cluster.base import Node
from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.config import load
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError
from antiphon.core.types import Message, ScoreStatus
from antiphon.run.config import RunConfig
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.graders import start_graders
from antiphon.run.placement import resolve_placement
from antiphon.tasks.base import Transcript
from tests.raising import raises_with
from tests.unit.tasks.test_grading import prompt

CORES = tuple(sorted(os.sched_getaffinity(0)))


class Nodes(LocalCluster):
    """This machine as several nodes, any of which may leave."""

    def __init__(self, *names):
        super().__init__(ClusterConfig())
        self.names = names
        self.left = set()

    def nodes(self):
        return [Node(name, CORES, has_left=name in self.left) for name in self.names]


def configured(reward, placement, **sections):
    """A run's configuration, without what is placed anywhere else."""
    tasks = [{"name": "t", "prompts": {"source": "jsonl", "path": "x"}, "reward": f"tests.unit.tasks.{reward}"}]
    ray = {"kind": "ray"} if placement == "anywhere" else {}
    return load(
        {"model": {"path": "x"}, "tasks": tasks, "placement": {"reward": placement}, "cluster": ray, **sections},
        model=RunConfig,
    )


async def with_graders(cluster, config, use):
    """Return what `use` returns of the router and of the list that takes messages for the user."""
    told = []
    context = LaunchContext(
        cluster=cluster,
        config=config,
        placement=resolve_placement(cluster.nodes(), config),
        deadlines=Deadlines(),
        report=told.append,
    )
    try:
        async with start_graders(context) as graders:
            return await use(graders.router, told)
    finally:
        await cluster.close()


def processes():
    """Hosts of graders that are children of this process, by process id."""
    return {child.pid for child in psutil.Process().children(recursive=True) if grades(child)}


def grades(process):
    return any("tasks.grading.worker" in " ".join(child.cmdline()) for child in process.children())


def graders_of(scores):
    return Counter(score.grader for score in scores)


@pytest.mark.parametrize("placement", ["node1.cpu:0-0, node2.cpu:0-0", "anywhere"])
def test_gradings_spread_over_nodes_and_name_them(placement):
    async def use(router, told):
        asked = [router.score(prompt("wait"), Transcript([Message("assistant", str(n))])) for n in range(24)]
        scores = await asyncio.gather(*asked)
        return scores, router.stats, told

    config = configured("hostile_rewards:obey", placement)
    scores, stats, told = asyncio.run(with_graders(Nodes("a", "b", "c"), config, use))
    assert {score.status for score in scores} == {ScoreStatus.SCORED}
    nodes = {grader.rpartition(" on ")[2] for grader in graders_of(scores)}
    assert nodes == ({"node0", "node1", "node2"} if placement == "anywhere" else {"node1", "node2"})
    assert max(graders_of(scores).values()) <= 24 / len(nodes) + 1
    assert (stats.scored, stats.processes) == (24, len(nodes))
    assert told == []


def test_a_lost_host_is_replaced_and_its_gradings_go_on():
    cluster = Nodes("a", "b", "c")

    async def use(router, told):
        before = processes()
        asked = [router.score(prompt("wait"), Transcript([Message("assistant", str(n))])) for n in range(16)]
        scores = asyncio.gather(*asked)
        await asyncio.sleep(0)  # all are under way
        os.kill(min(before), signal.SIGKILL)
        scores = await scores
        while len(processes()) < 2:
            await router.score(prompt("wait"), Transcript([Message("assistant", "again")]))
        return before, processes(), scores, told

    config = configured("hostile_rewards:obey", "node1.cpu:0-0, node2.cpu:0-0")
    before, after, scores, told = asyncio.run(with_graders(cluster, config, use))
    assert len(before) == len(after) == 2 and len(before & after) == 1
    assert {score.value for score in scores} == {1.0} and len(scores) == 16
    assert len(told) == 1 and told[0].endswith("graders left: 1")


def test_hung_host_is_killed_and_replaced():
    async def use(router, told):
        hung = min(processes())
        os.kill(hung, signal.SIGSTOP)
        asked = [router.score(prompt("wait"), Transcript([Message("assistant", str(n))])) for n in range(8)]
        scores = await asyncio.gather(*asked)
        return hung, scores, told

    config = configured("hostile_rewards:obey", "node1.cpu:0-0, node2.cpu:0-0", rollout={"engine_timeout": 2.0})
    hung, scores, told = asyncio.run(with_graders(Nodes("a", "b", "c"), config, use))
    assert {score.value for score in scores} == {1.0} and not psutil.pid_exists(hung)
    assert "did not answer for 2 s" in told[0]


def test_gradings_go_on_when_a_node_has_left_and_come_back_with_it():
    cluster = Nodes("a", "b", "c")

    async def use(router, told):
        cluster.left = {"b"}
        gone = next(pid for pid in processes() if await_node(pid) == "node1")
        os.kill(gone, signal.SIGKILL)
        scores = [await router.score(prompt("wait"), Transcript([Message("assistant", "x")])) for _ in range(3)]
        while not any("nowhere to run" in message for message in told):
            scores.append(await router.score(prompt("wait"), Transcript([Message("assistant", "x")])))
        cluster.left = set()
        while not scores[-1].grader.endswith("node1"):
            scores += await asyncio.gather(
                *(router.score(prompt("wait"), Transcript([Message("assistant", "x")])) for _ in range(2))
            )
        return scores

    def await_node(pid):
        """The node of a host: that of place 0 was started first."""
        return "node1" if pid == min(processes()) else "node2"

    config = configured("hostile_rewards:obey", "node1.cpu:0-0, node2.cpu:0-0")
    scores = asyncio.run(with_graders(cluster, config, use))
    assert {score.status for score in scores} == {ScoreStatus.SCORED}


def test_reward_that_cannot_be_built_is_named():
    async def use(router, told):
        raise AssertionError("started")

    config = configured("hostile_rewards:Broken", "node1.cpu:0-0")
    with raises_with(ConfigError):
        asyncio.run(with_graders(Nodes("a", "b"), config, use))
    assert not processes()


def test_nothing_is_left_behind():
    async def use(router, told):
        return processes()

    there = asyncio.run(with_graders(Nodes("a", "b"), configured("hostile_rewards:obey", "node0.cpu:0-0, node1.cpu:0-0"), use))
    assert len(there) == 2 and not processes()
