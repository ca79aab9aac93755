"""The profile of a worker's process."""

import asyncio
import gzip
import json
from pathlib import Path
from threading import Thread

import pytest
import torch

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.errors import WorkerDiedError
from antiphon.core.profiles import ProfiledHandles
from antiphon.core.torch_profile import ProfiledWorker

HERE = "tests.unit.core.test_profiles"


class Multiplier(ProfiledWorker):
    """Multiplies in a thread, as engines and reward models may."""

    def multiply(self, times: int) -> None:
        thread = Thread(target=lambda: [torch.ones(3, 3) @ torch.ones(3, 3) for _ in range(times)])
        thread.start()
        thread.join()


def count_products(file: Path) -> int:
    with gzip.open(file) as content:
        return sum(event["name"] == "aten::mm" for event in json.load(content)["traceEvents"])


def test_a_profile_has_what_all_threads_did_in_its_time(tmp_path):
    worker = Multiplier()
    for step, times in enumerate((2, 3)):
        worker.multiply(5)
        worker.start_profile(True)  # of memory nothing is known: there is no GPU, or it has not been used
        worker.multiply(times)
        worker.write_profile(tmp_path / f"step_{step}", "worker")
        assert [file.name for file in (tmp_path / f"step_{step}").iterdir()] == ["worker.json.gz"]
        assert count_products(tmp_path / f"step_{step}" / "worker.json.gz") == times


def test_of_several_in_a_process_one_has_the_profile(tmp_path):
    one, other = Multiplier(), Multiplier()
    for each in (one, other):
        each.start_profile(False)
        each.multiply(1)
    for each, name in ((other, "other"), (one, "one")):
        each.write_profile(tmp_path, name)
    assert [file.name for file in tmp_path.iterdir()] == ["one.json.gz"]
    assert count_products(tmp_path / "one.json.gz") == 2


def test_a_worker_that_has_not_begun_writes_nothing(tmp_path):
    Multiplier().write_profile(tmp_path, "late")
    assert not [*tmp_path.iterdir()]


def test_workers_that_have_died_are_left_out(tmp_path):
    async def body():
        cluster = LocalCluster(ClusterConfig())
        handles = [cluster.spawn(name, f"{HERE}:Multiplier") for name in ("one", "two", "three")]
        profiled = ProfiledHandles(lambda: handles)
        await profiled.start_profile(False)
        await asyncio.gather(*(handle.call("multiply", 1) for handle in handles))
        handles[1].kill()
        with pytest.raises(WorkerDiedError):
            await handles[1].died()
        await profiled.write_profile(tmp_path, "a-")
        await cluster.close()

    asyncio.run(body())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a-one.json.gz", "a-three.json.gz"]
