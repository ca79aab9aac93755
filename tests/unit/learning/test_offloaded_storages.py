"""Memory that leaves a device and comes back to the same tensors."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.learning.backends.offloaded_storages import OffloadedStorages, find_tensors

CPU = torch.device("cpu")


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    views=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 49)), max_size=8),
)
def test_views_come_back_as_views_of_what_they_were(sizes, views):
    buffers = [torch.arange(1.0, size + 1) for size in sizes]
    viewed = [buffers[number % len(buffers)][start:] for number, start in views]
    expected = [tensor.clone() for tensor in (*buffers, *viewed)]
    offloaded = OffloadedStorages()
    offloaded.take([*viewed, *buffers, *viewed], CPU)
    assert all(buffer.untyped_storage().nbytes() == 0 for buffer in buffers)
    offloaded.take(buffers, CPU)  # once more: there is nothing left to take
    offloaded.restore()
    assert all(torch.equal(a, b) for a, b in zip((*buffers, *viewed), expected, strict=True))
    buffers[0].fill_(7.0)
    assert all(
        bool((view == 7.0).all()) for view, (number, _) in zip(viewed, views, strict=True) if number % len(sizes) == 0
    )


def test_what_need_not_be_kept_comes_back_as_zeros():
    scratch, kept, elsewhere = torch.ones(3), torch.ones(3), torch.ones(3, device="meta")
    offloaded = OffloadedStorages()
    offloaded.take([scratch, elsewhere], CPU, copy=False)
    offloaded.take([scratch, kept], CPU)
    offloaded.restore()
    assert scratch.tolist() == [0.0] * 3 and kept.tolist() == [1.0] * 3


def test_memory_that_cannot_be_resized_stays(tmp_path):
    (tmp_path / "file").write_bytes(bytes(8))
    mapped = torch.from_file(str(tmp_path / "file"), size=2)
    offloaded = OffloadedStorages()
    offloaded.take([mapped], CPU)
    assert mapped.tolist() == [0.0, 0.0]
    offloaded.restore()
    assert mapped.tolist() == [0.0, 0.0]


def test_tensors_are_found_in_nested_values():
    first, second, third = (torch.tensor(number) for number in range(3))
    found = find_tensors({"state": [first, (second, None, 3)], "other": {"deep": third}})
    assert [int(tensor) for tensor in found] == [0, 1, 2]
