"""Weights in a GPU's own memory: from one process to another they never leave it, and what was changed there is refused."""

import asyncio

import pytest
import torch

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.errors import WeightsError
from antiphon.weights.base import TransferContext, open_channel
from antiphon.weights.digest import digest_on_device
from tests.raising import raises_with

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_engines_load_from_learner_memory_and_check_digests(tmp_path):
    tensors = [("a", torch.randn(1000, 33)), ("b", torch.randn(7).to(torch.bfloat16)), ("c", torch.randn(20, 30).T)]
    sender = open_channel(TransferContext(tmp_path, "device_memory"))

    async def main():
        cluster = LocalCluster(ClusterConfig(), tmp_path)
        try:
            engines = [
                cluster.spawn(f"engine-{n}", "tests.chaos.receivers:Receiver", "device_memory") for n in range(2)
            ]
            for version in range(3):
                named = [(name, (tensor + version).cuda()) for name, tensor in tensors]
                update = sender.send(named, version)
                expected = open_channel(TransferContext(tmp_path)).send(
                    [(name, tensor.cpu()) for name, tensor in named], version
                )
                here = cluster.spawn(f"reader-{version}", "tests.chaos.receivers:Receiver", "shared_memory")
                wanted = await here.call("load", expected)
                assert [await engine.call("load", update) for engine in engines] == [wanted, wanted]
            sender._content[12345] ^= 1
            with raises_with(WeightsError, match="digest", version=update.version):
                await engines[0].call("load", update)
        finally:
            await cluster.close()

    asyncio.run(main())


def test_the_digest_is_the_same_on_every_device():
    content = torch.randint(0, 256, (40_000_003,), dtype=torch.uint8)
    assert digest_on_device(content) == digest_on_device(content.cuda())


def test_what_leaves_a_gpu_arrives_as_it_was(tmp_path):
    """Of all forms that a learner's weights have: other dtypes, pieces of larger tensors, transposed ones."""
    whole = torch.randn(300, 70, device="cuda")
    named = [("whole", whole), ("columns", whole[:, 3:9]), ("turned", whole.T), ("half", whole.bfloat16())]
    channel = open_channel(TransferContext(tmp_path))
    arrived = {name: tensor.clone() for name, tensor in channel.receive(channel.send(named, 1))}  # before anyone waits
    assert arrived.keys() == dict(named).keys()
    for name, tensor in named:
        assert torch.equal(arrived[name].cpu(), tensor.cpu()), name
