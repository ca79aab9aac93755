"""What a run holds of a Ray that has other jobs: devices that are free, the same for all who share them, until its end."""

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from uuid import uuid4

import pytest

from antiphon.cluster.base import CLUSTERS, Place
from antiphon.cluster.config import ClusterConfig
from tests.chaos.test_nodes import HOST, Nodes

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is optional: pip install -e '.[ray]'"),
]
GPUS = {"0", "1", "2", "3"}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a Ray of two nodes: the controller's, and one that says it has four GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", uuid4().hex)
        nodes = Nodes(tmp_path_factory.mktemp("ray"))
        nodes.start(1, f"--address={nodes.address}", "--num-gpus=4")
        yield nodes.address
        nodes.kill(1)
        nodes.kill(0)


@pytest.fixture(scope="module")
def taken(address):
    """The GPUs that another job has."""
    with job() as other:
        yield other.submit(take, address, 2).result()


def job():
    """A process that can be the driver of a job."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def take(address, count):
    """Have so many GPUs until this process ends."""
    import ray

    ray.init(address, logging_level="ERROR")
    HELD.append(ray.remote(num_cpus=0, num_gpus=count)(Taker).remote())
    return ray.get(HELD[-1].gpus.remote())


HELD = []  # actors, which would end with their handles


class Taker:
    def gpus(self):
        import ray

        return {str(gpu) for gpu in ray.get_gpu_ids()}


def reserved(address, *shares):
    """Reserve GPUs by their numbers on node1, a worker for each of `shares`: what those workers see."""

    async def main():
        cluster = CLUSTERS.resolve("ray")(ClusterConfig(kind="ray", address=address))
        try:
            node = cluster.nodes()[1].id
            places = [Place(node=node, gpus=gpus, cores=(0,)) for gpus in shares]
            await cluster.reserve([*places, Place(anywhere=True)])
            workers = [
                cluster.spawn("worker", "tests.unit.cluster.workers_for_tests:Counter", place=place) for place in places
            ]
            return await asyncio.gather(*(worker.call("gpus") for worker in workers))
        finally:
            await cluster.close()

    return asyncio.run(main())


def test_workers_have_the_gpus_that_others_leave(address, taken):
    with job() as ours:
        both, one, again = ours.submit(reserved, address, ("0", "1"), ("1",), ("0", "1")).result()
        assert {*both} == GPUS - taken
        assert one == both[1:] and again == both, "what shares a GPU sees the same one"
        # Closed, it has given back what it had.
        assert {*ours.submit(reserved, address, ("2", "3")).result()[0]} == GPUS - taken


def test_nested_workers_get_the_remaining_gpus(project, address, taken):
    (project.folder / "noting.py").write_text(NOTING)
    config = project.config(
        cluster={"kind": "ray", "address": address},
        weights={"channel": "distributed", "host": HOST},
        placement={"learner": "node1.gpu:0", "engine": "node1.gpu:0-1"},
        learner={"kind": "noting:Learner"},
        engine={"kind": "noting:open_engine", "replicas": 2},
        rollout={"workers": 1, "timeout": 400},
        steps=1,
    )
    done = project.run("train", config)
    assert done.returncode == 0, done.stdout + done.stderr
    learner, *_ = (project.folder / "learner").iterdir()
    engines = {seen.name for seen in (project.folder / "engine").iterdir()}
    assert engines == GPUS - taken
    assert learner.name in engines


NOTING = """
import os
from pathlib import Path

from antiphon.engines.native.factory import open_engine as open_native
from antiphon.learning.torch_learner import TorchLearner

HERE = Path(__file__).parent


def note(role):
    (HERE / role / os.environ["CUDA_VISIBLE_DEVICES"]).mkdir(parents=True, exist_ok=True)


def open_engine(model, config, receive):
    note("engine")
    return open_native(model, config, receive)


class Learner(TorchLearner):
    def __init__(self, *args):
        note("learner")
        super().__init__(*args)
"""


def test_what_others_have_is_refused_before_anything_starts(project, address, taken):
    config = project.config(
        cluster={"kind": "ray", "address": address},
        weights={"channel": "object_store"},
        placement={"engine": "node1.gpu:0-3"},
        engine={"replicas": 4},
    )
    done = project.run("train", config)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "4 GPUs of node1, where 2 are free" in done.stderr and "Traceback" not in done.stderr
    assert not list((project.folder / "runs").glob("run/logs/*.log"))
    with job() as ours:
        (both,) = ours.submit(reserved, address, ("2", "3")).result()
        assert {*both} == GPUS - taken, "none of the four was kept"
