"""Weights that are broadcast to processes, which come late, die on the way, or get something else."""

import asyncio
import hashlib
from dataclasses import replace

import pytest
import torch

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.errors import WeightsError, WorkerDiedError
from antiphon.weights.base import TransferContext, open_channel
from antiphon.weights.manifest import BUCKET_BYTES
from tests.raising import raises_with


class Sending:
    """A sender here, receivers in processes."""

    def __init__(self, tmp_path, cluster, receivers):
        self.sender = open_channel(TransferContext(tmp_path, "distributed"))
        self.cluster = cluster
        self.receivers = [self.join(number) for number in range(receivers)]
        self.version = 0

    def join(self, number):
        return self.cluster.spawn(f"receiver-{number}", "tests.chaos.receivers:Receiver", "distributed")

    def send(self, buckets=3):
        """A version of so many buckets and a bit; returns the update, and what a receiver should say of it."""
        self.version += 1
        tensor = torch.randint(0, 256, (buckets * BUCKET_BYTES + 17,), dtype=torch.uint8)
        said = f"a {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes()
        return self.sender.send([("a", tensor)], self.version), hashlib.blake2b(said).hexdigest()


def sending(tmp_path, receivers, main):
    async def body():
        cluster = LocalCluster(ClusterConfig(), tmp_path / "logs")
        try:
            await asyncio.wait_for(main(Sending(tmp_path, cluster, receivers)), 120)
        finally:
            await cluster.close()

    asyncio.run(body())


@pytest.mark.chaos
def test_receivers_come_together_and_late(tmp_path):
    async def main(sending):
        for _ in range(2):
            update, digest = sending.send()
            assert [await each for each in [r.call("load", update) for r in sending.receivers]] == [digest] * 2
        update, digest = sending.send()
        first, second = sending.receivers
        assert await first.call("load", update) == digest  # the other has not asked
        assert await sending.join(2).call("load", update) == digest
        assert await second.call("load", update) == digest
        with raises_with(WeightsError, version=update.version - 1):
            await first.call("load", replace(update, version=update.version - 1))

    sending(tmp_path, 2, main)


@pytest.mark.chaos
@pytest.mark.parametrize("bucket", [1, 3])
def test_one_that_dies_in_a_broadcast_keeps_nobody_else_from_it(tmp_path, bucket):
    async def main(sending):
        update, digest = sending.send()
        assert await asyncio.gather(*(r.call("load", update) for r in sending.receivers)) == [digest] * 3
        await sending.receivers[0].call("arm", "weights.bucket", bucket)
        update, digest = sending.send()
        dead, *alive = await asyncio.gather(
            *(r.call("load", update) for r in sending.receivers), return_exceptions=True
        )
        assert isinstance(dead, WorkerDiedError) and alive == [digest] * 2
        update, digest = sending.send()
        assert await asyncio.gather(*(r.call("load", update) for r in sending.receivers[1:])) == [digest] * 2

    sending(tmp_path, 3, main)


@pytest.mark.chaos
def test_corrupt_skipped_or_reordered_buckets_are_refused(tmp_path):
    def corrupt(copy):
        copy[BUCKET_BYTES + 5] ^= 1

    def skip(copy):
        copy[BUCKET_BYTES : 2 * BUCKET_BYTES] = 0

    def reorder(copy):
        first = copy[:BUCKET_BYTES].clone()
        copy[:BUCKET_BYTES] = copy[BUCKET_BYTES : 2 * BUCKET_BYTES]
        copy[BUCKET_BYTES : 2 * BUCKET_BYTES] = first

    async def main(sending):
        (receiver,) = sending.receivers
        for damage in (corrupt, skip, reorder):
            update, _ = sending.send()
            damage(sending.sender.copy.content)
            with raises_with(WeightsError, match="digest", version=update.version):
                await receiver.call("load", update)
        update, digest = sending.send()
        assert await receiver.call("load", update) == digest

    sending(tmp_path, 1, main)
