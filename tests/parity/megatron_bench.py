"""Megatron-Core on a CPU, for tests alone: what of CUDA its code names on the way of a learner is something else here."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
from torch import distributed
from torch.overrides import TorchFunctionMode

torch._dynamo.config.disable = True  # before megatron decorates its functions


class _OnCPU(TorchFunctionMode):
    """Whatever is to be on a CUDA device is on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if "device" in options:
            options["device"] = _cpu(options["device"])
        if func is torch.Tensor.to:
            args = tuple(map(_cpu, args))
        found = func(*args, **options)
        if func is torch.Tensor.type and len(args) == 1 and not options:
            return found.replace("torch.", "torch.cuda.")
        return found


class _Nothing:
    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: _Nothing()


def _cpu(device: Any) -> Any:
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    return "cpu" if isinstance(device, str) and device.startswith("cuda") else device


def _with_cpu(decorate: Any) -> Any:
    return lambda *args, **options: decorate(*args, **(options | {"device_type": "cpu"}))


def install() -> None:
    """For this process, once and for all; before megatron is imported."""
    cuda = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache", "_lazy_init"):
        setattr(cuda, name, lambda *args, **options: None)
    cuda.current_device = lambda: torch.device("cpu")
    cuda.device_count = lambda: 1
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = lambda *args: _Nothing()
    cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *args, **options: self
    torch.nn.Module.cuda = lambda self, *args, **options: self
    torch.Tensor.record_stream = lambda *args, **options: None
    for name in ("custom_fwd", "custom_bwd"):
        setattr(torch.amp, name, _with_cpu(getattr(torch.amp, name)))
    exchange = distributed.all_to_all_single

    def plain(sizes: Any) -> Any:
        return None if sizes is None else [int(size) for size in sizes]

    def all_to_all(output: Any, given: Any, come: Any = None, leave: Any = None, **options: Any) -> Any:  # gloo: lists
        come, leave = options.pop("output_split_sizes", come), options.pop("input_split_sizes", leave)
        return exchange(output, given, plain(come), plain(leave), **options)

    distributed.all_to_all_single = all_to_all
    _OnCPU().__enter__()
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)


install()

from antiphon.learning.backends.megatron import MegatronLearner  # noqa: E402
from tests.parity.workbench import Workbench  # noqa: E402


class ShimmedLearner(MegatronLearner):
    """On a CPU."""

    runs_on = "cpu"


class MegatronBench(Workbench):
    """Has a learner on Megatron-Core at a time."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """See `Workbench.parameters`."""
        yield from self.learner.shards.model.parameters()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Workbench.gradients`."""
        shards = self.learner.shards
        trained = ((name, part) for name, part in shards.parts.items() if shards.is_trained(name))
        return ((name, part.read([p.grad for p in shards.fused[name]])) for name, part in trained)
