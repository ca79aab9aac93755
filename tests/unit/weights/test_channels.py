"""Weights on their way: what arrives is what was sent, or it is refused."""

import os
import re
import resource
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore
from torch.multiprocessing.reductions import StorageWeakRef

from antiphon.core import failpoints
from antiphon.core.errors import ConfigError, WeightsError
from antiphon.learning.parallel.whole_model import GatheredTensor
from antiphon.weights.base import CHANNELS, TransferContext, open_channel
from antiphon.weights.delta import DeltaEncoder, apply_delta
from antiphon.weights.digest import digest_on_device
from antiphon.weights.listeners import ListeningSockets
from antiphon.weights.manifest import BUCKET_BYTES
from antiphon.weights.tensors import HostBuffer, pack_tensors
from tests.raising import raises_with

HERE = sorted(set(CHANNELS.known) - {"object_store"})  # that needs Ray, and is tested with it

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64])
SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@pytest.fixture(scope="module", params=HERE)
def way(request, tmp_path_factory):
    """Both ends of a channel."""
    opened = open_channel(TransferContext(tmp_path_factory.mktemp("exchange"), request.param))
    return opened.send, opened.receive


@pytest.fixture
def files(tmp_path):
    opened = open_channel(TransferContext(tmp_path))
    return opened.send, opened.receive


def test_a_stranger_who_writes_to_the_store_stops_nothing(tmp_path):
    """Another user of the machine, with torch's own client and without the secret of the run."""
    opened = open_channel(TransferContext(tmp_path, "distributed"))
    update = opened.send({"a": torch.ones(3)}.items(), 1)
    host, port = re.search(r"(\d+\.\d+\.\d+\.\d+):(\d+)", update.location).groups()
    with suppress(RuntimeError):  # it may be turned away
        stranger = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=2))
        stranger.queue_push("asked", "garbage")
    ((name, tensor),) = opened.receive(update)
    assert name == "a" and tensor.tolist() == [1.0, 1.0, 1.0]


def test_broadcast_is_unaffected_by_a_newer_version(tmp_path):
    """Both ends are here: the learner makes the next version when its thread has broadcast the first bucket of this one."""
    opened = open_channel(TransferContext(tmp_path, "distributed"))
    here, buckets, made = threading.current_thread(), [], threading.Event()

    def ask():
        made.set()
        return torch.zeros(3 * BUCKET_BYTES, dtype=torch.uint8)

    later = GatheredTensor(torch.Size((3 * BUCKET_BYTES,)), torch.uint8, torch.device("cpu"), ask)
    sender = threading.Thread(target=lambda: opened.send([("a", later)], 2))

    def look(point, _path):
        if point == "weights.bucket" and threading.current_thread() is not here:
            buckets.append(point)
            if len(buckets) == 2:
                sender.start()
                if made.wait(0.5):  # which it must not be
                    sender.join()

    update = opened.send([("a", torch.ones(3 * BUCKET_BYTES, dtype=torch.uint8))], 1)
    failpoints.watch(look)
    try:
        ((_, tensor),) = opened.receive(update)
    finally:
        failpoints.watch(None)
    assert len(buckets) == 3 and bool((tensor == 1).all())
    sender.join()
    assert made.is_set(), "then it is made"


@settings(max_examples=40, deadline=None)
@given(tensors=st.lists(st.tuples(DTYPES, SHAPES, st.booleans()), min_size=1, max_size=6))
def test_round_trip(way, tensors):
    send, receive = way
    named = {}
    for index, (dtype, shape, transposed) in enumerate(tensors):
        tensor = (torch.randn(shape) * 100).to(dtype)
        named[f"t{index}"] = tensor.T.contiguous().T if transposed and tensor.ndim == 2 else tensor
    received = {name: tensor.clone() for name, tensor in receive(send(named.items(), 1))}
    assert list(received) == list(named)
    for name, tensor in named.items():
        assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)


@pytest.mark.parametrize("channel", HERE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_travel_in_the_dtype_of_the_engines(tmp_path, channel, dtype):
    """What an engine of that dtype loads is the same, and of floats alone: a count stays exact."""
    opened = open_channel(TransferContext(tmp_path, channel, dtype=dtype))
    kind = getattr(torch, dtype)
    named = {"a": torch.randn(400, 33), "b": torch.randn(330, 50).T, "count": torch.tensor([2**24 + 1])}
    update = opened.send(named.items(), 1)
    received = {name: tensor.clone() for name, tensor in opened.receive(update)}
    assert all(torch.equal(received[name], named[name].to(kind)) for name in ("a", "b"))
    assert received["a"].dtype == kind
    assert torch.equal(received["count"], named["count"])
    assert update.manifest.size < sum(tensor.nbytes for tensor in named.values()) * 0.51


def changed_at(generator, tensor, share):
    """A copy of which this share of the elements has other bits."""
    places = torch.rand(tensor.shape, generator=generator) < share
    return torch.where(places, (tensor.float() * 1.01 + 0.001).to(tensor.dtype), tensor)


@settings(max_examples=60, deadline=None)
@given(
    tensors=st.lists(st.tuples(DTYPES, SHAPES), min_size=1, max_size=5),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_a_difference_makes_the_new_bytes_of_the_old(tensors, share, seed):
    generator = torch.Generator().manual_seed(seed)
    old = {f"t{i}": torch.randn(shape, generator=generator).to(dtype) for i, (dtype, shape) in enumerate(tensors)}
    new = {name: changed_at(generator, tensor, share) for name, tensor in old.items()}
    buffer, encoder = HostBuffer(), DeltaEncoder()
    pack_tensors(old.items(), buffer, None)
    kept = buffer.content.clone()
    pack_tensors(new.items(), buffer, None, delta=encoder)
    apply_delta(kept, encoder.encoded())
    assert torch.equal(kept, buffer.content)


def test_a_small_step_is_a_small_difference():
    """One weight of 128 by the last bit, as after a step at a small learning rate: under a byte and a half each."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(2 * BUCKET_BYTES // 2 + 5, generator=generator).to(torch.bfloat16)  # more than a piece
    flipped = torch.rand(len(old), generator=generator) < 1 / 128
    new = (old.view(torch.int16) ^ flipped.to(torch.int16)).view(torch.bfloat16)
    buffer, encoder = HostBuffer(), DeltaEncoder()
    pack_tensors([("a", old)], buffer, None)
    pack_tensors([("a", new)], buffer, None, delta=encoder)
    assert len(encoder.encoded()) < 1.5 * int(flipped.sum())


@pytest.mark.parametrize("sizes", [(1,), (1, 1), (2,), (1.5, 0.5, 1)])
def test_buckets_that_are_full(way, sizes):
    send, receive = way
    named = [(f"t{n}", torch.randint(255, (int(size * BUCKET_BYTES),)).byte()) for n, size in enumerate(sizes)]
    received = dict(receive(send(named, 1)))
    assert all(torch.equal(received[name], tensor) for name, tensor in named)


def test_a_tensor_is_asked_for_when_the_one_before_is_gone(way):
    send, receive = way
    memory, there = [], []

    def ask(number):
        made = torch.full((300, 200), float(number))
        there.append(sum(not each.expired() for each in memory))
        memory.append(StorageWeakRef(made.untyped_storage()))
        return made if number % 2 else made.T

    shapes = [torch.Size((300, 200) if number % 2 else (200, 300)) for number in range(4)]
    cpu = torch.device("cpu")
    named = [(f"t{n}", GatheredTensor(shape, torch.float32, cpu, partial(ask, n))) for n, shape in enumerate(shapes)]
    received = {name: tensor.clone() for name, tensor in receive(send(named, 1))}
    assert there == [0, 0, 0, 0]
    assert all(torch.equal(received[f"t{n}"], torch.full(shape, float(n))) for n, shape in enumerate(shapes))


def test_other_ranks_do_not_wait_for_one_that_has_no_room(tmp_path):
    asked = []
    spread = GatheredTensor(
        torch.Size((3,)), torch.float32, torch.device("cpu"), lambda: asked.append(1) or torch.zeros(3)
    )
    with pytest.raises(WeightsError, match=r"weights\.directory"):
        open_channel(TransferContext(tmp_path / "gone")).send([("a", spread), ("b", spread)], 1)
    assert len(asked) == 2, "all give their pieces of each"


def test_channels_agree_on_the_digest(tmp_path):
    named = [("a", torch.randn(100, 33)), ("b", torch.randn(7).to(torch.bfloat16)), ("c", torch.randn(5))]
    updates = [open_channel(TransferContext(tmp_path, name)).send(named, 1) for name in HERE]
    assert len({update.manifest.digest for update in updates}) == 1


@settings(max_examples=60, deadline=None)
@given(data=st.binary(min_size=1, max_size=64), place=st.integers(0, 1000), length=st.integers(1, 300))
def test_digest_on_the_device_detects_any_change(data, place, length):
    """Of a GPU's memory; the arithmetic is the same everywhere."""
    content = torch.from_numpy(np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8))
    before = digest_on_device(content)
    assert before == digest_on_device(content.clone())
    changed = content.clone()
    start = place % length
    fresh = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: length - start]
    changed[start : start + len(fresh)] = fresh
    assert (digest_on_device(changed) == before) == torch.equal(changed, content)
    words = content[: length // 16 * 16].view(2, -1) if length >= 16 else content.view(1, -1)
    swapped = words.flip(0).reshape(-1)
    assert (digest_on_device(swapped) == digest_on_device(words.reshape(-1))) == torch.equal(words.flip(0), words)


def test_swapped_tensors_are_refused(way):
    send, receive = way
    update = send([("a", torch.randn(16)), ("b", torch.randn(16))], 1)
    first, second = update.manifest.tensors
    swapped = replace(update.manifest, tensors=(replace(first, name="b"), replace(second, name="a")))
    with pytest.raises(WeightsError):
        next(iter(receive(replace(update, manifest=swapped))))


@pytest.mark.parametrize("position", [0, 12345, -1])
def test_a_changed_byte_is_refused(files, position):
    send, receive = files
    update = send([("a", torch.randn(100, 100)), ("b", torch.randn(16))], 7)
    buffer = np.memmap(update.location, dtype=np.uint8, mode="r+")
    buffer[position] ^= 1
    buffer.flush()
    with raises_with(WeightsError, match="digest", version=7):
        next(iter(receive(update)))


def test_weights_that_are_gone_are_refused(files):
    send, receive = files
    update = send([("a", torch.zeros(4))], 1)
    Path(update.location).unlink()
    with raises_with(WeightsError, match=re.escape(update.location), version=1):
        next(iter(receive(update)))


@pytest.mark.parametrize("length", [4, 5])
def test_a_version_takes_the_place_of_the_one_before(files, length):
    send, receive = files
    one = send([("a", torch.full((4,), 1.0))], 1)
    assert [float(tensor[0]) for _, tensor in receive(one)] == [1.0]
    two = send([("a", torch.full((length,), 2.0))], 2)
    assert [float(tensor[0]) for _, tensor in receive(two)] == [2.0]
    with raises_with(WeightsError, version=1):
        next(iter(receive(one)))


def test_weights_that_do_not_fit_are_an_error(files):
    send, _ = files
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(WeightsError, match=r"weights\.directory"):
            send([("a", torch.zeros(1 << 20))], 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_address_that_is_not_the_learners_is_an_error(tmp_path):
    with raises_with(ConfigError, key="weights.host", value="203.0.113.7"):
        open_channel(TransferContext(tmp_path, "distributed", "203.0.113.7"))


def test_listening_sockets_are_those_of_the_thread_that_opened_them():
    """An engine joins the groups of several senders at once; it must refuse nobody else's peers."""
    interval, found, opened = sys.getswitchinterval(), {}, {}

    def join(number):
        listeners = ListeningSockets()
        for _ in range(20):
            with listeners.track():
                listener = socket.create_server(("127.0.0.1", 0))
            opened.setdefault(number, []).append(listener)
        found[number] = set(listeners._found)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=join, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, own in opened.items():
            assert found[number] == {os.fstat(listener.fileno()).st_ino for listener in own}
    finally:
        sys.setswitchinterval(interval)
        for listener in chain(*opened.values()):
            listener.close()
