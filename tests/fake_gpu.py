"""A fake GPU, for tests of what the package does on GPUs alone: tensors that say that they are on `cuda:0`, and are not.

    python -m pytest -p tests.fake_gpu tests/gpu/test_learner.py

Their numbers are in the machine's memory and are computed by the CPU's kernels, so results can be compared with those of a CPU.
It is strict where a GPU shows a mistake by chance only:

* An operation on tensors of both devices fails; numpy sees no tensor of the GPU.
* A copy to the machine's memory that nobody waited for reads as garbage, until somebody waits (`synchronize`, `item`, …).
* Pinned memory that is changed while a copy from it may still be under way fails at the next wait.
* Memory that was freed stays with the allocator until `empty_cache`; what is `empty` is full of NaN.

It cannot show streams other than the default, kernels of GPUs and their rounding, several GPUs, or drivers. Under autocast the
CPU's lists of operations apply.
"""

import gc
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import gpu_paths

if gpu_paths.LOG in os.environ:
    gpu_paths.watch()  # before the first module of the package is imported

import torch
from torch.multiprocessing import reductions
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from antiphon.cluster import devices

CPU, CUDA, NAME = torch.device("cpu"), torch.device("cuda", 0), "fake GPU"
LIKE = [f"{name}_like" for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")]
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
COPIES = {"aten.copy_.default"}  # between devices
INDEXES = {"aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default"}
_COPY = torch.Tensor.copy_
WAITS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default", "aten.equal.default"}


class Storages:
    """A set of storages that live."""

    def __init__(self) -> None:
        self._found: dict[int, StorageWeakRef] = {}  # which keep the addresses from being used again

    def add(self, tensor: torch.Tensor) -> None:
        """Add the storage of a tensor."""
        storage = tensor.untyped_storage()
        self._found[storage._cdata] = StorageWeakRef(storage)
        if not len(self._found) % 1000:
            self.sizes()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._found

    def sizes(self) -> list[int]:
        """Return the bytes of each storage, after those that are gone were forgotten."""
        gc.collect()
        self._found = {address: weak for address, weak in self._found.items() if not weak.expired()}
        return [torch.UntypedStorage._new_with_weak_ptr(address).nbytes() for address in self._found]


class FakeGpu:
    """Which memory is the GPU's or pinned, and which copies are under way."""

    def __init__(self) -> None:
        self.memory, self.pinned = Storages(), Storages()
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the host, and what arrives with the next wait
        self._leaving: list[tuple[torch.Tensor, torch.Tensor]] = []  # pinned memory, and what was in it
        self._reserved = 0

    def copy_in(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        """Return a copy on the GPU: of what is on its way to the host, if it was queued before."""
        place = tensor.data_ptr(), tensor.shape
        queued = (content for target, content in self._arriving if (target.data_ptr(), target.shape) == place)
        content = next(queued, tensor)
        if non_blocking and tensor in self.pinned:
            self._leaving.append((tensor.detach(), content.detach().clone()))
        return _ToGpu.apply(content)

    def copy_out(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        """Return a copy in the machine's memory."""
        copied = _ToHost.apply(tensor)
        if non_blocking:
            self.delay(copied.detach())
        else:
            self.synchronize()
        return copied

    def delay(self, tensor: torch.Tensor) -> None:
        """Let what is in a tensor of the host arrive there with the next wait alone."""
        self._arriving.append((tensor, tensor.clone()))
        spoilt = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8).fill_(0xA5)
        _COPY(tensor, spoilt.view(tensor.dtype).view(tensor.shape))

    def synchronize(self, device: Any = None) -> None:
        """Wait for all copies.

        Raises:
            RuntimeError: Pinned memory was changed meanwhile.
        """
        for target, content in self._arriving:
            target.copy_(content)
        leaving, self._arriving, self._leaving = self._leaving, [], []
        if not all(torch.equal(source, content) for source, content in leaving):
            raise RuntimeError("pinned memory was changed while it was copied to cuda:0")

    def memory_allocated(self, device: Any = None) -> int:
        """Return the bytes of the tensors that live."""
        return sum(self.memory.sizes())

    def memory_reserved(self, device: Any = None) -> int:
        """Return the bytes that other processes cannot have: those that are in use, or were since `empty_cache`."""
        self._reserved = max(self._reserved, self.memory_allocated())
        return self._reserved

    def empty_cache(self) -> None:
        """Leave to others what no tensor has."""
        self._reserved = self.memory_allocated()


GPU = FakeGpu()


class _Mode(TorchDispatchMode):
    """Follows on which device each result is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, tensors = str(func), _tensors((args, kwargs))
        ours = [each for each in tensors if each in GPU.memory]
        if ours and name not in COPIES:
            written = [value for value, about in zip(args, func._schema.arguments, strict=False) if about.is_write]
            others = [each for each in tensors if each.dim() or any(each is target for target in _tensors(written))]
            indexed = name in INDEXES and tensors[0] in GPU.memory
            if not indexed and not all(each in GPU.memory for each in others):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {name} got some on cuda:0 and on cpu"
                )
        if ours and name in WAITS:
            GPU.synchronize()
        found = func(*args, **(kwargs or {}))
        if ours and name not in COPIES:
            for each in _tensors(found):
                GPU.memory.add(each)
        return found


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


class _ToGpu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.clone()
        GPU.memory.add(copied)
        return copied

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _ToHost.apply(gradient)


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _COPY(torch.empty(tensor.shape, dtype=tensor.dtype), tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _ToGpu.apply(gradient)


def _move(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
    if tensor.is_cuda == (device.type == "cuda"):
        return tensor
    return (GPU.copy_in if device.type == "cuda" else GPU.copy_out)(tensor, non_blocking=non_blocking)


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device.type == "meta" or tensor.is_meta:
            return original(tensor, *args, copy=copy, **kwargs)
        moved = _move(tensor, device, non_blocking=non_blocking)
        layout = layout or torch.preserve_format
        return original(moved, dtype or tensor.dtype, copy=copy and moved is tensor, memory_format=layout)

    return to


def _make(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes tensors so that it makes them where it is asked to."""

    @wraps(original)
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type not in ("cuda", "cpu"):
            made = original(*args, **({} if device is None else {"device": device}), **kwargs)
        else:
            made = _move(original(*args, device="cpu", **kwargs), torch.device(device))
        if made.is_cuda and "empty" in original.__name__ and made.is_floating_point():
            made.fill_(torch.nan)
        if pin_memory:
            GPU.pinned.add(made)
        return made

    return make


def _copy_(original: Callable[..., Any]) -> Callable[..., Any]:
    def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if source.is_cuda and not target.is_cuda and non_blocking:
            original(target, _ToHost.apply(source))
            GPU.delay(target.detach())
            return target
        return original(target, _move(source, target.device, non_blocking=non_blocking))

    return copy_


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    if tensor.is_cuda:
        raise RuntimeError("cannot pin memory of cuda:0")
    pinned = tensor.clone()
    GPU.pinned.add(pinned)
    return pinned


def _of_host(original: Callable[..., Any]) -> Callable[..., Any]:
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_cuda:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return original(tensor, *args, **kwargs)

    return read


def _after_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def read(tensor: torch.Tensor) -> Any:
        if tensor.is_cuda:
            GPU.synchronize()
        return original(tensor)

    return read


def _by_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def ask(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return ask


class _Stream:
    """A stream of the GPU, on which everything is done at once."""


class _Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _histc(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that counts integers, as on GPUs alone, too."""

    def histc(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counted = original(values if values.is_floating_point() else values.float(), *args, **kwargs)
        return counted.to(values.dtype)

    return histc


def _reduce_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a handle of a tensor for another process: one of CUDA IPC, if it is on the GPU."""

    def reduce_tensor(tensor: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        handle = original(tensor)
        return (rebuild_cuda_tensor, (*handle, *[None] * 4, CUDA.index)) if tensor.is_cuda else handle

    return reduce_tensor


def rebuild_cuda_tensor(rebuild: Callable[..., Any], arguments: tuple[Any, ...], *others: Any) -> torch.Tensor:
    """Return the tensor of another process that a handle is of."""
    if others[-1] != CUDA.index:
        raise RuntimeError(f"CUDA error: invalid device ordinal {others[-1]}")
    opened: torch.Tensor = rebuild(*arguments)
    GPU.memory.add(opened)
    return opened


def _device(original: Any) -> property:
    def get(tensor: torch.Tensor) -> torch.device:
        found = original.__get__(tensor)
        return CUDA if found == CPU and tensor.layout == torch.strided and tensor in GPU.memory else found

    return property(get)


def install() -> None:
    """Add the GPU to torch, until the process ends."""
    # Which torch remembers as they are now: `with torch.device(…)` looks for those.
    makers = [maker.__name__ for maker in _device_constructors() if getattr(torch, maker.__name__, None) is maker]
    torch.Tensor.device = _device(torch.Tensor.device)
    torch.Tensor.is_cuda = property(lambda tensor: tensor.device.type == "cuda")
    torch.Tensor.is_cpu = property(lambda tensor: tensor.device.type == "cpu")
    for name in [*makers, *LIKE]:
        setattr(torch, name, _make(getattr(torch, name)))
    for name in METHODS:
        setattr(torch.Tensor, name, _make(getattr(torch.Tensor, name)))
    torch.Tensor.to = _to(torch.Tensor.to)
    torch.Tensor.cuda = lambda tensor, device=None, non_blocking=False: _move(tensor, CUDA, non_blocking=non_blocking)
    torch.Tensor.cpu = lambda tensor: _move(tensor, CPU)
    torch.Tensor.copy_ = _copy_(torch.Tensor.copy_)
    torch.Tensor.pin_memory = _pin_memory
    torch.Tensor.is_pinned = lambda tensor, device=None: tensor in GPU.pinned
    torch.Tensor.numpy = _of_host(torch.Tensor.numpy)
    torch.Tensor.__array__ = _of_host(torch.Tensor.__array__)
    torch.Tensor.tolist = _after_wait(torch.Tensor.tolist)
    torch.autocast = torch.amp.autocast = torch.amp.autocast_mode.autocast = _Autocast
    torch.histc = _histc(torch.histc)
    reductions.reduce_tensor = _reduce_tensor(reductions.reduce_tensor)
    reductions.rebuild_cuda_tensor = rebuild_cuda_tensor
    torch.is_autocast_enabled = _by_cpu(torch.is_autocast_enabled)
    torch.get_autocast_dtype = _by_cpu(torch.get_autocast_dtype)
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.get_device_name = lambda device=None: NAME
    cuda.get_device_properties = lambda device=None: SimpleNamespace(name=NAME, uuid="GPU-0", major=9, minor=0)
    cuda.Stream, cuda.stream = _Stream, lambda stream: nullcontext()
    cuda.synchronize, cuda.empty_cache = GPU.synchronize, GPU.empty_cache
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # bitsandbytes looks for it
    cuda.memory_allocated, cuda.memory_reserved = GPU.memory_allocated, GPU.memory_reserved
    devices._DRIVER = Path("/proc")
    folder = Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "fake_gpu_processes"), str(folder.parent)])
    _Mode().__enter__()
    run = threading.Thread.run

    def run_in_mode(thread: threading.Thread) -> None:
        with _Mode():
            run(thread)

    threading.Thread.run = run_in_mode


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out what needs the driver of a GPU."""
    left_out = [item for item in items if item.get_closest_marker("driver")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


install()
