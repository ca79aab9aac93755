"""Weights that are broadcast to processes, which come late, die on the way, or get something else."""

import asyncio
import hashlib
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.errors import WeightsError, WorkerDiedError
from antiphon.weights.base import TransferContext, open_channel
from antiphon.weights.manifest import BUCKET_BYTES
from antiphon.weights.reshard import join_updates
from tests.chaos.receivers import digest_of, rows
from tests.raising import raises_with


class Sending:
    """A sender here, receivers in processes."""

    def __init__(self, tmp_path, cluster, receivers, encoding):
        self.sender = open_channel(TransferContext(tmp_path, "distributed", encoding=encoding))
        self.cluster = cluster
        self.receivers = [self.join(number) for number in range(receivers)]
        self.version = 0

    def join(self, number):
        return self.cluster.spawn(f"receiver-{number}", "tests.chaos.receivers:Receiver", "distributed")

    def send(self, buckets=3):
        """A version of so many buckets and a bit; returns the update, and what a receiver should say of it."""
        return self._send(torch.randint(0, 256, (buckets * BUCKET_BYTES + 17,), dtype=torch.uint8))

    def change(self, share=0.005):
        """The version before, changed here and there; returned as by `send`."""
        return self._send(self.tensor ^ (torch.rand(self.tensor.shape) < share).byte())

    def _send(self, tensor):
        self.version, self.tensor = self.version + 1, tensor
        said = f"a {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes()
        return self.sender.send([("a", tensor)], self.version), hashlib.blake2b(said).hexdigest()


def sent_over_loopback():
    """Bytes that the kernel has sent from this machine to itself."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def sending(tmp_path, receivers, main, encoding="whole"):
    async def body():
        cluster = LocalCluster(ClusterConfig(), tmp_path / "logs")
        try:
            await asyncio.wait_for(main(Sending(tmp_path, cluster, receivers, encoding)), 120)
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
@pytest.mark.parametrize("bucket", [1, pytest.param(3, marks=pytest.mark.long)])
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
@pytest.mark.long
def test_one_that_dies_while_it_connects_keeps_nobody_else_from_it(tmp_path):
    async def main(sending):
        update, digest = sending.send()
        await sending.receivers[0].call("die_at_next_join")
        dead, *alive = await asyncio.gather(
            *(r.call("load", update) for r in sending.receivers), return_exceptions=True
        )
        assert isinstance(dead, WorkerDiedError) and alive == [digest] * 3

    sending(tmp_path, 4, main)


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


@pytest.mark.chaos
def test_differences_go_to_those_that_have_the_version_before(tmp_path):
    """By the kernel's count: a version of 48 MiB of which one weight in 200 changed, to two receivers that have it."""

    async def main(sending):
        async def load(receivers, sent):
            before, (update, digest) = sent_over_loopback(), sent
            assert await asyncio.gather(*(r.call("load", update) for r in receivers)) == [digest] * len(receivers)
            return sent_over_loopback() - before

        size = 3 * BUCKET_BYTES
        assert await load(sending.receivers, sending.send()) > 2 * size
        few = [await load(sending.receivers, sending.change()) for _ in range(3)]
        assert min(few) < size / 10, few  # the least: others send here, too
        late = sending.join(2)
        assert await load([*sending.receivers, late], sending.change()) > size
        again = [await load([*sending.receivers, late], sending.change()) for _ in range(3)]
        assert min(again) < size / 5, again
        await load([late], sending.change())  # the others missed it
        assert await load([*sending.receivers, late], sending.change()) > size
        assert await load([*sending.receivers, late], sending.send(2)) > 2 * size  # of another size
        await load([*sending.receivers, late], sending.change(0.9))  # nearly all of it

    sending(tmp_path, 2, main, "delta")


@pytest.mark.chaos
def test_one_that_dies_in_a_difference_keeps_nobody_else_from_it(tmp_path):
    async def main(sending):
        update, digest = sending.send()
        assert await asyncio.gather(*(r.call("load", update) for r in sending.receivers)) == [digest] * 3
        await sending.receivers[0].call("arm", "weights.bucket", 1)
        update, digest = sending.change()
        dead, *alive = await asyncio.gather(
            *(r.call("load", update) for r in sending.receivers), return_exceptions=True
        )
        assert isinstance(dead, WorkerDiedError) and alive == [digest] * 2
        update, digest = sending.change()
        assert await asyncio.gather(*(r.call("load", update) for r in sending.receivers[1:])) == [digest] * 2

    sending(tmp_path, 3, main, "delta")


@pytest.mark.chaos
def test_a_difference_to_something_else_is_refused_once(tmp_path):
    """What arrived is not what was sent: the receiver keeps nothing of it, and takes the next version whole."""

    async def main(sending):
        (receiver,) = sending.receivers
        update, _ = sending.send()
        sending.sender.copy.content[5] ^= 1
        with raises_with(WeightsError, match="digest", version=update.version):
            await receiver.call("load", update)
        sending.sender.copy.content[5] ^= 1
        update, digest = sending.change()
        assert await receiver.call("load", update) == digest

    sending(tmp_path, 1, main, "delta")


SENDERS, ENGINES = 2, 3
ROWS, WIDTH = 40, BUCKET_BYTES // 16  # of a sender: two buckets and a half
DEADLINE = 100.0  # seconds


def expected_at(version):
    """The digest of what an engine should have."""
    return digest_of([("a", torch.cat([rows(rank, version, ROWS, WIDTH) for rank in range(SENDERS)]))])


class Mesh:
    """Ranks that send their rows, and engines, all in processes; those that die are replaced."""

    def __init__(self, folder, cluster, encoding):
        self.folder, self.cluster, self.encoding = folder, cluster, encoding
        self.spawned = self.version = 0
        self.senders = [self.start_sender(rank) for rank in range(SENDERS)]
        self.engines = [self.start_engine() for _ in range(ENGINES)]

    def start(self, name, kind, *args):
        self.spawned += 1
        return self.cluster.spawn(f"{name}-{self.spawned}", f"tests.chaos.receivers:{kind}", *args)

    def start_sender(self, rank):
        return self.start("sender", "SendingRank", str(self.folder), self.encoding, rank, SENDERS, ROWS, WIDTH)

    def start_engine(self):
        return self.start("engine", "Receiver", "distributed")

    async def send(self):
        self.version += 1
        parts = await asyncio.gather(*(sender.call("send", self.version) for sender in self.senders))
        return join_updates(self.version, parts)

    async def load(self, update, engines):
        """What each engine has, or the error that it met; all answer in time."""
        calls = [engine.call("load", update) for engine in engines]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), DEADLINE)


@pytest.mark.chaos
@pytest.mark.parametrize("encoding", [pytest.param("whole", marks=pytest.mark.long), "delta"])
def test_ranks_and_engines_die_anywhere_and_no_engine_has_wrong_weights(tmp_path, request, encoding):
    """An engine that dies keeps nobody from the version. If a rank dies, engines have the version or an error."""
    draw = random.Random(request.config.getoption("--seed"))
    rounds = request.config.getoption("--kills") or (20 if request.config.getoption("--long") else 2)

    async def main(mesh):
        for number in range(rounds):
            ranks_die = number % 2 == 1
            members = mesh.senders if ranks_die else mesh.engines
            place, bucket = draw.randrange(len(members)), draw.randint(1, 1 if encoding == "delta" else 3)
            engines = list(mesh.engines)
            if late := draw.random() < 0.5:
                engines.append(mesh.start_engine())
            update = await mesh.send()
            await members[place].call("arm", "weights.bucket", bucket)
            found = await mesh.load(update, engines)
            right = expected_at(mesh.version)
            for engine, answer in zip(engines, found, strict=True):
                if ranks_die:
                    assert answer == right or isinstance(answer, WeightsError), answer
                elif engine is mesh.engines[place]:
                    assert isinstance(answer, WorkerDiedError)
                else:
                    assert answer == right
            if late:
                engines[-1].kill()
            members[place].kill()
            if ranks_die:  # as all processes of a learner are started again, if one is lost
                for sender in mesh.senders:
                    sender.kill()
                mesh.senders = [mesh.start_sender(rank) for rank in range(SENDERS)]
            else:
                mesh.engines[place] = mesh.start_engine()
            update = await mesh.send()
            assert await mesh.load(update, mesh.engines) == [expected_at(mesh.version)] * ENGINES

    async def body():
        cluster = LocalCluster(ClusterConfig(), tmp_path / "logs")
        try:
            await main(Mesh(tmp_path, cluster, encoding))
        finally:
            await cluster.close()

    asyncio.run(body())
