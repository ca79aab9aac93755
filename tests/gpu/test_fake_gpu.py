"""The fake GPU itself: that it says of tensors what a GPU does, and refuses what a GPU refuses, or would get wrong."""

import sys

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("tests.fake_gpu" not in sys.modules, reason="is about tests.fake_gpu"),
]


def test_tensors_stay_where_they_were_put():
    layer = torch.nn.Linear(4, 4).to("cuda")
    x = torch.ones(3, 4).cuda()
    layer(x).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    there = [layer.weight, layer.weight.grad, layer(x), x.T, x[1:], x.new_zeros(2), torch.zeros_like(x), x.bfloat16()]
    assert all(each.is_cuda and each.device == torch.device("cuda:0") for each in there)
    here = [x.cpu(), x.to("cpu", torch.float64), torch.zeros_like(x, device="cpu"), torch.ones(3)]
    assert not any(each.is_cuda for each in here)
    layer.to("cpu")
    assert not layer.weight.is_cuda and layer(torch.ones(3, 4)).shape == (3, 4)


def test_gradients_cross_from_device_to_device():
    x = torch.ones(3, requires_grad=True)
    (2 * x.cuda()).cpu().sum().backward()
    assert x.grad.tolist() == [2.0] * 3 and not x.grad.is_cuda


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x + torch.ones(4),
        lambda x: torch.ones(4) @ x,
        lambda x: torch.zeros(4).add_(x),
        lambda x: torch.zeros(()).add_(x.sum()),
        lambda x: torch.cat([x, torch.ones(4)]),
        lambda x: torch.arange(9)[x.long()],
        lambda x: torch.where(torch.ones(4).bool(), x, 0.0),
    ],
)
def test_devices_do_not_mix(mistake):
    with pytest.raises(RuntimeError, match="on the same device"):
        mistake(torch.ones(4, device="cuda"))


def test_scalars_and_indices_of_the_host_may_mix():
    x = torch.arange(4.0, device="cuda")
    assert (x * torch.tensor(2.0))[torch.tensor([3, 1])].tolist() == [6.0, 2.0]


@pytest.mark.parametrize("read", [torch.Tensor.numpy, np.asarray])
def test_numpy_sees_none_of_it(read):
    with pytest.raises(TypeError, match="cuda:0"):
        read(torch.ones(3, device="cuda"))


WAITS = {
    "synchronize": torch.cuda.synchronize,
    "a number": lambda: torch.ones(1, device="cuda").item(),
    "a copy": lambda: torch.ones(1, device="cuda").cpu(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_copy_is_there_after_a_wait(wait):
    x = torch.ones(3, device="cuda")
    copied, target = x.to("cpu", non_blocking=True), torch.zeros(3).pin_memory()
    target.copy_(x, non_blocking=True)
    assert copied.tolist() != [1.0] * 3 and target.tolist() != [1.0] * 3
    wait()
    assert copied.tolist() == [1.0] * 3 and target.tolist() == [1.0] * 3


def test_pinned_memory_must_stay_until_it_was_copied():
    pinned = torch.ones(3).pin_memory()
    copied = pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    pinned.zero_()  # now it may
    assert copied.tolist() == [1.0] * 3
    pinned.to("cuda", non_blocking=True)
    pinned.fill_(7.0)
    with pytest.raises(RuntimeError, match="pinned"):
        torch.cuda.synchronize()


def test_copies_to_the_host_and_back_are_made_in_order():
    x = torch.arange(3.0, device="cuda")
    host = torch.empty(3, pin_memory=True)
    host.copy_(x, non_blocking=True)
    x.zero_()
    back = host.to("cuda", non_blocking=True)
    assert back.tolist() == [0.0, 1.0, 2.0]


def test_memory_is_counted_once_and_kept_by_the_allocator():
    before, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    x = torch.ones(1000, device="cuda")
    views = [x[number:] for number in range(9)]
    assert torch.cuda.memory_allocated() == before + 4000 and torch.cuda.memory_reserved() >= held
    held = torch.cuda.memory_reserved()
    del x, views
    assert torch.cuda.memory_allocated() == before and torch.cuda.memory_reserved() == held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_what_is_empty_has_no_numbers():
    assert torch.empty(3, device="cuda").isnan().all() and torch.ones(3, device="cuda").new_empty(2).isnan().all()
