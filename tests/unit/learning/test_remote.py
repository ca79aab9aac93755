"""The models of a run in a process of their own, which asks roles of the run."""

import asyncio

import pytest

from antiphon.algorithms.rewards import AlgorithmState
from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.rpc import AsyncWorker
from antiphon.learning.remote import RemoteTrainer
from antiphon.learning.step import wait_forever


class Asking(AsyncWorker):
    """Its step is what a role says of the number and of the version."""

    async def _live(self):
        async def learn(number, version, groups, state):
            return await self._ask("tally", number, version) if number else version

        async with asyncio.TaskGroup() as owner:
            await self._serve(owner, {"learn": learn})


async def tally(number, version):
    return f"step {number} at {version}"


@pytest.mark.parametrize(
    ("roles", "number", "said"),
    [({"tally": tally}, 3, "step 3 at 7"), ({}, 0, 7), (None, 0, 7)],
    ids=["one role", "no roles", "none given"],
)
def test_a_step_may_ask_the_roles_of_the_run(roles, number, said):
    waited = []

    async def wait(answer):
        waited.append(number)
        return await wait_forever(answer)

    async def main():
        cluster = LocalCluster(ClusterConfig(debug=True))
        try:
            trainer = RemoteTrainer(cluster.spawn("trainer", f"{__name__}:Asking"), wait, roles)
            await trainer.started()
            return await asyncio.wait_for(trainer.learn(number, 7, [], AlgorithmState()), 60)
        finally:
            await cluster.close()

    assert asyncio.run(main()) == said
    assert waited == [number], "a step is bounded"
