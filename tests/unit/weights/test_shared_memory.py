"""Weights through shared memory: what arrives is what was sent, or it is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.errors import WeightsError
from antiphon.weights.base import remove
from antiphon.weights.shared_memory import receive, send

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64])
SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(tensors=st.lists(st.tuples(DTYPES, SHAPES, st.booleans()), min_size=1, max_size=6))
def test_round_trip(tmp_path_factory, tensors):
    directory = tmp_path_factory.mktemp("exchange")
    named = {}
    for index, (dtype, shape, transposed) in enumerate(tensors):
        tensor = (torch.randn(shape) * 100).to(dtype)
        named[f"t{index}"] = tensor.T.contiguous().T if transposed and tensor.ndim == 2 else tensor
    received = {name: tensor.clone() for name, tensor in receive(send(named.items(), 1, directory))}
    assert list(received) == list(named)
    for name, tensor in named.items():
        assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)


@pytest.mark.parametrize("position", [0, 12345, -1])
def test_a_changed_byte_is_refused(tmp_path, position):
    update = send([("a", torch.randn(100, 100)), ("b", torch.randn(16))], 7, tmp_path)
    buffer = np.memmap(update.location, dtype=np.uint8, mode="r+")
    buffer[position] ^= 1
    buffer.flush()
    with pytest.raises(WeightsError, match="weights of version 7 arrived with digest"):
        next(iter(receive(update)))


def test_swapped_tensors_are_refused(tmp_path):
    update = send([("a", torch.randn(16)), ("b", torch.randn(16))], 1, tmp_path)
    first, second = update.manifest.tensors
    swapped = replace(update.manifest, tensors=(replace(first, name="b"), replace(second, name="a")))
    with pytest.raises(WeightsError):
        next(iter(receive(replace(update, manifest=swapped))))


def test_removed_weights_are_refused_and_removing_twice_is_fine(tmp_path):
    update = send([("a", torch.zeros(4))], 1, tmp_path)
    remove(update)
    remove(update)
    with pytest.raises(WeightsError, match="cannot be read"):
        next(iter(receive(update)))


def test_versions_do_not_disturb_each_other(tmp_path):
    one = send([("a", torch.full((4,), 1.0))], 1, tmp_path)
    two = send([("a", torch.full((4,), 2.0))], 2, tmp_path)
    assert [float(t[0]) for update in (one, two) for _, t in receive(update)] == [1.0, 2.0]
